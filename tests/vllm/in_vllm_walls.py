"""Run by the Python of an environment with vLLM: what breaks behind a hook never gets through it.

Each public name of each class that vLLM calls is called with parts that break at every touch.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType, SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext

from kvtier.client import Client
from kvtier.connectors.vllm.block_identity import BlockFacts, RankReport
from kvtier.connectors.vllm.jobs import LoadJob, StepJobs, StepResults
from kvtier.connectors.vllm.kv_events import KvEvents
from kvtier.connectors.vllm.messages import KvtierMetrics, KvtierStats, StepMetadata, WorkerMetadata
from kvtier.connectors.vllm_tier import KvtierOffloadingConnector, KvtierTier
from kvtier.core.identity import NO_TENANT
from kvtier.core.layout import KVLayout
from tests.vllm.in_vllm_hooks import connector_of, group_of


class Broken:
    """Raises, whatever is done with it."""

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError("a bug")

    __getattr__ = __bool__ = __call__ = __iter__ = __len__ = __getitem__ = _raise


PARTS = (
    "_setup",
    "_facts",
    "_scheduler",
    "_worker",
    "_pool",
    "_events",
    "_reports",
    "_copies",
    "_resolver",
    "_connector_metadata",
)
"""Of a connector."""

HOOKS: Mapping[str, object] = {
    "requires_kv_delivery": False,
    "register_kv_caches": None,
    "get_handshake_metadata": ...,
    "start_load_kv": None,
    "wait_for_layer_load": None,
    "save_kv_layer": None,
    "wait_for_save": None,
    "get_finished": (None, None),
    "get_block_ids_with_load_errors": set(),
    "build_connector_worker_meta": None,
    "set_xfer_handshake_metadata_pp_aware": None,
    "bind_gpu_block_pool": None,
    "on_new_request": None,
    "get_num_new_matched_tokens": (0, False),
    "update_state_after_alloc": None,
    "build_connector_meta": StepMetadata(StepJobs(), b""),
    "update_connector_output": None,
    "request_finished_all_groups": (False, None),
    "has_pending_push_work": False,
    "has_pending_block_frees": False,
    "take_events": (),
    "reset_cache": True,
    "get_external_cache_hit_sources": {},
    "get_kv_connector_stats": None,
    "build_kv_connector_stats": KvtierStats(),
    "build_prom_metrics": None,
    "shutdown": None,
}
"""What vLLM is told; anything where it says ``...``."""

TIER_HOOKS: Mapping[str, object] = {
    "lookup": LookupResult.MISS,
    "submit_store": None,
    "submit_load": None,
    "get_finished_jobs": [],
    "touch": None,
    "on_new_request": RequestOffloadingContext(),
    "on_request_finished": None,
    "on_schedule_end": None,
    "drain_jobs": None,
    "shutdown": None,
}


def walk(make: Callable[[], Any], hooks: Mapping[str, object]) -> None:
    """Call all that a class has of its own on a fresh one of it, and compare what comes back."""
    kind = type(make())
    kinds = (FunctionType, classmethod, property)
    members = vars(kind).items()
    own = {name for name, each in members if not name.startswith("_") and isinstance(each, kinds)}
    assert own == set(hooks), own ^ set(hooks)
    for name, wanted in hooks.items():
        found = call(getattr(make(), name))
        assert wanted is ... or found == wanted, f"{name} returned {found}"


def call(hook: Any) -> Any:
    if not callable(hook):
        return hook
    asked = inspect.signature(hook).parameters.values()
    return hook(*(Broken() for each in asked if each.kind is each.POSITIONAL_OR_KEYWORD))


@contextmanager
def connectors() -> Iterator[Callable[[], Any]]:
    """Lend what makes a connector as vLLM makes it."""
    with TemporaryDirectory() as name:
        yield lambda: connector_of(Path(name), group_of(FullAttentionSpec))


def check_connector() -> None:
    with connectors() as make:

        def broken() -> Any:
            connector = make()
            connector.shutdown()
            assert set(vars(connector)) >= set(PARTS)
            vars(connector).update({name: Broken() for name in PARTS}, _are_workers_told=True)
            return connector

        walk(broken, HOOKS)


def check_start() -> None:
    """What breaks while it is made leaves one that is there and does nothing."""
    parts = (
        "connector.join_log",
        "connector.read_settings",
        "setup.refusal",
        "setup.KeySpaceResolver",
    )
    with connectors() as make:
        for part in parts:
            with patch(f"kvtier.connectors.vllm.{part}", Broken()):
                connector = make()
            connector.on_new_request(SimpleNamespace(request_id="a", lora_request=None))
            assert connector.get_num_new_matched_tokens(Broken(), 0) == (0, False)
            assert not connector.has_pending_push_work()
            connector.shutdown()


def check_worker_begins_later() -> None:
    """Where no thread is to be had a worker reports its orders, and begins with a later step."""
    layout = KVLayout("vllm-lbhnc", 1, 64, 4096, "float32", "small")
    load = LoadJob("a", NO_TENANT, ((bytes(16),),), 0, ((7, -1),), (1,), 1e12)
    start, failed = threading.Thread.start, []

    def start_none_of_ours(thread: threading.Thread) -> None:
        if thread.name == "kvtier-keeper" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with connectors() as make:
        connector = make()
        connector._facts = RankReport(BlockFacts("{}", layout, "float32", "vllm", "auto", 1, 0, 4))
        connector._copies = SimpleNamespace(num_readers=1, arena=None, close=lambda: None)
        connector.bind_connector_metadata(StepMetadata(StepJobs(loads=[load]), bytes(32)))
        with patch.object(threading.Thread, "start", start_none_of_ours):
            connector.start_load_kv(None)
        assert failed
        assert connector._worker is None
        assert connector.get_finished(set()) == (None, {"a"})
        assert connector.get_block_ids_with_load_errors() == {7}
        assert not [each for each in threading.enumerate() if each.name == "kvtier-report"]
        connector.bind_connector_metadata(StepMetadata(StepJobs(), bytes(32)))
        connector.start_load_kv(None)
        assert isinstance(connector._worker._client, Client)
        connector.shutdown()


def check_events() -> None:
    """What cannot be told is given up: vLLM does not go on with empty steps for ever."""
    with connectors() as make:
        connector = make()
        events = connector._events = KvEvents(group_of(FullAttentionSpec).kv_cache_spec, 64, 4)
        router_feed: Any = events.router_feed
        connector._scheduler = SimpleNamespace(
            is_joining=False, has_pending_stores=False, close=lambda: None
        )
        connector._are_workers_told = True
        router_feed._stale.add(SimpleNamespace(position=0, keys=(bytes(16),)))
        assert connector.has_pending_push_work()
        with patch.object(router_feed, "take", Broken()):
            for _ in range(20):
                assert connector.take_events() == ()
        assert not connector.has_pending_push_work()
        assert connector.take_events() == []
        connector.shutdown()


def check_counts() -> None:
    broken: Any = Broken()
    stats = KvtierStats(data=broken)
    assert stats.aggregate(broken) is stats
    assert stats.reduce() == {}
    assert stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    told = WorkerMetadata(StepResults(3))
    assert told.aggregate(broken) is told
    metrics = KvtierMetrics.__new__(KvtierMetrics)
    for series in ({}, broken):
        metrics._series = series
        for counts in (broken, {"vllm:kvtier_attached": {"": broken}}, {"x": broken}):
            metrics.observe(counts)


def check_tier() -> None:
    def broken() -> Any:
        tier = KvtierTier.__new__(KvtierTier)
        vars(tier).update(
            _parts=Broken(),
            _failed=[],
            _opening=threading.Lock(),
            _is_closed=False,
            _digests=Broken(),
            _block_tokens=0,
        )
        return tier

    walk(broken, TIER_HOOKS)
    tier = broken()
    tier.submit_store(SimpleNamespace(job_id=7))
    tier.submit_load(SimpleNamespace(job_id=8))
    ended = tier.get_finished_jobs()
    assert [(each.job_id, each.success) for each in ended] == [(7, False), (8, False)]


def check_tier_connector() -> None:
    connector = KvtierOffloadingConnector.__new__(KvtierOffloadingConnector)
    vars(connector).update(_pages=Broken(), _vllm_config=Broken(), _kv_cache_config=Broken())
    assert connector.get_handshake_metadata().refusal == "a bug"
    connector.set_xfer_handshake_metadata_pp_aware({})


if __name__ == "__main__":
    check_connector()
    check_start()
    check_worker_begins_later()
    check_events()
    check_counts()
    check_tier()
    check_tier_connector()
    print(f"{vllm.__version__}: ok")
