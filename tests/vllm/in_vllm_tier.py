"""Run by the Python of an environment with vLLM: our tier behind vLLM's own manager of tiers.

Each case has a daemon of its own, and engines that are vLLM's manager with its CPU tier in shared
memory, driven by the calls of vLLM's scheduling half in their order. What would be on a GPU is made
up: a chunk's bytes depend on its name. ``in_vllm_tier.py`` runs all cases, or those that are named.
"""

import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from kvtier.connectors.vllm_tier import KvtierOffloadingConnector
from kvtier.connectors.vllm_tier.identity import ModelFacts
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.host_spec import HostTieringSpec

MODELS = Path(__file__).resolve().parents[2] / ".vllm" / "models"

CHUNK_TOKENS = 64
CHUNK_BYTES = 65536
NUM_CHUNKS = 16
"""Of the CPU tier."""

_numbers = count()


def names(num: int, prompt: int = 0) -> list[bytes]:
    """Return vLLM's names for the chunks of a prompt."""
    return [make_offload_key(bytes([prompt, place]) * 16, 0) for place in range(num)]


def content(name: bytes) -> bytes:
    """Return the bytes of a chunk."""
    return np.random.default_rng(list(name)).bytes(CHUNK_BYTES)


def _make(kind: Any, **values: Any) -> Any:
    """Make a record of vLLM's, of which a release may lack a field."""
    return kind(**{each.name: values[each.name] for each in fields(kind) if each.name in values})


def _config(socket: Path, model: ModelFacts | None) -> OffloadingConfig:
    tier: dict[str, Any] = {
        "type": "KvtierTier",
        "module_path": "kvtier.connectors.vllm_tier",
        "socket": str(socket),
        "lookup_timeout_ms": 2000,  # on a busy machine a late lookup would be a miss
    }
    group = _make(
        OffloadingGroupConfig,
        tokens_per_block=CHUNK_TOKENS // 2,
        layer_names=("layer",),
        group_id=0,
    )
    sizes = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    ranks = {"rank": 0, "data_parallel_index": 0, "data_parallel_rank_local": None}
    parallel = _make(
        OffloadingParallelConfig,
        **sizes,
        **ranks,
        data_parallel_size=1,
        is_parallelism_agnostic=False,
    )
    made: OffloadingConfig = _make(
        OffloadingConfig,
        groups=(group,),
        worker_kv_bytes_per_block=CHUNK_BYTES // 2,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": NUM_CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [tier | ({"model": model} if model else {})],
        },
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        model=OffloadingModelConfig("small", "float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=CHUNK_TOKENS // 2, blocks_per_chunk=2),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )
    return made


class Engine:
    """vLLM's manager, and the calls that its scheduling half makes."""

    def __init__(
        self,
        node: RunningNode,
        model: str = "tiny",
        *,
        is_told: bool = True,
        pages: str = "1x(cpu)",
    ) -> None:
        folder = MODELS / model
        self.pages: Future[str] = Future()
        self.facts = ModelFacts(
            "small", lambda: folder, "{}", "float16", "auto", "vllm test", self.pages
        )
        if pages:
            self.pages.set_result(pages)
        spec = HostTieringSpec(_config(node.socket, self.facts if is_told else None))
        self.manager = spec.get_manager()
        self.primary = self.manager.primary_tier
        self.tier = self.manager.secondary_tiers[0]
        self.rows = np.asarray(self.primary.get_kv_memoryview())
        self.slowest_s = 0.0
        """What the slowest of the calls took that a request waits for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self.rows
        self.manager.shutdown()  # fails where somebody has not let go of its memory

    def await_joined(self) -> None:
        await_true(lambda: self.tier._parts and self.tier._parts.client.is_attached, "it is joined")

    def begin(self, chunks: Sequence[bytes]) -> ReqContext:
        """Begin a request of these chunks."""
        context = ReqContext(req_id=f"request-{next(_numbers)}")
        self.manager.on_new_request(context)
        if hasattr(context, "set_offload_key_position"):
            for place, name in enumerate(chunks):
                context.set_offload_key_position(name, (place + 1) * CHUNK_TOKENS)
        return context

    def look(self, context: ReqContext, chunks: Sequence[bytes], first: int = 0) -> int | None:
        """Return how many leading chunks are in the CPU tier, None where that is not known yet."""
        found, is_known = 0, True
        for name in chunks[first:]:
            began_s = time.perf_counter()
            answer = self.manager.lookup(name, context)
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began_s)
            if answer is LookupResult.MISS:
                break
            found += answer is not LookupResult.RETRY
            is_known &= answer is LookupResult.HIT
        self._touch(context, chunks)
        self.step()
        return found if is_known else None

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def ask(self, chunks: Sequence[bytes], first: int = 0) -> int:
        """Return how many leading chunks a request finds from ``first`` on; their bytes are right.

        What it does not find, it computes and stores.
        """
        context = self.begin(chunks)
        found = self.await_found(context, chunks, first)
        self.check(context, chunks[first : first + found])
        self.compute(context, chunks)
        self.end(context)
        return found

    def await_found(self, context: ReqContext, chunks: Sequence[bytes], first: int = 0) -> int:
        answers: list[int] = []

        def look() -> bool:
            answer = self.look(context, chunks, first)
            answers.extend([] if answer is None else [answer])
            return answer is not None

        await_true(look, "it is known what is there", 20)
        return answers[0]

    def check(self, context: ReqContext, chunks: Sequence[bytes]) -> None:
        """Read chunks in the CPU tier, as for a copy to the GPU."""
        if not chunks:
            return
        loaded = self.manager.prepare_load(chunks, context)
        for name, chunk in zip(chunks, loaded.block_ids, strict=True):
            assert self.rows[chunk].tobytes() == content(name), "other bytes came back"
        self.manager.complete_load(chunks, context)

    def compute(self, context: ReqContext, chunks: Sequence[bytes]) -> None:
        """Put chunks into the CPU tier, as from the GPU."""
        self._touch(context, chunks)
        granted = self.manager.prepare_store(chunks, context)
        assert granted is not None, "the CPU tier is full"
        for name, chunk in zip(granted.keys_to_store, granted.store_spec.block_ids, strict=True):
            self.rows[chunk] = np.frombuffer(content(name), self.rows.dtype)
        if granted.keys_to_store:
            self.manager.complete_store(granted.keys_to_store, context)
        self.step()

    def end(self, context: ReqContext) -> None:
        """End a request, and wait until nothing of it is under way."""
        self.manager.on_request_finished(context)
        self.await_idle()

    def await_idle(self) -> None:
        def look() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        await_true(look, "no job is open", 20)

    def forget(self) -> None:
        """Empty vLLM's CPU tier."""
        self.manager.reset_cache()

    def _touch(self, context: ReqContext, chunks: Sequence[bytes]) -> None:
        if not hasattr(context, "set_offload_key_position"):
            self.manager.touch(chunks, context)


def found_by_tier(node: RunningNode) -> Mapping[str, int]:
    found: Mapping[str, int] = node.stat()["lookup_blocks"]["hit"]
    return found


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what is said on kvtier's log."""
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.getMessage()} {getattr(record, 'kvtier_fields', '')}")

    collector = Collector()
    logging.getLogger("kvtier").addHandler(collector)
    try:
        yield lines
    finally:
        logging.getLogger("kvtier").removeHandler(collector)


def chunks_come_back_from_each_tier(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), Engine(node) as engine:
        engine.await_joined()
        assert engine.ask(chunks) == 0
        node.await_blocks("ssd", 6)
        engine.forget()
        assert engine.ask(chunks) == 6
        assert found_by_tier(node) == {"cpu": 6, "ssd": 0, "remote": 0}
        engine.forget()
        node.drop("cpu")
        assert engine.ask(chunks) == 6
        assert found_by_tier(node) == {"cpu": 6, "ssd": 6, "remote": 0}
        assert engine.ask(chunks) == 6, "vLLM has them itself"
        assert found_by_tier(node) == {"cpu": 6, "ssd": 6, "remote": 0}
        engine.forget()
        assert engine.ask(names(6, prompt=1)) == 0
        node.await_idle()


def the_front_may_be_with_vllm(node: RunningNode) -> None:
    chunks = names(8)
    with node.daemon(), Engine(node) as engine:
        engine.await_joined()
        engine.ask(chunks)
        engine.forget()
        assert engine.ask(chunks, first=3) == 5
        engine.forget()
        assert engine.ask([*chunks[:5], *names(3, prompt=1)]) == 5
        node.await_idle()


def two_engines_share(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), Engine(node) as one, Engine(node) as two, Engine(node, "other") as other:
        for engine in (one, two, other):
            engine.await_joined()
        one.ask(chunks)
        assert two.ask(chunks) == 6
        assert other.ask(chunks) == 0
        assert node.stat()["tiers"]["cpu"]["blocks"] == 12


def what_vllm_has_is_offered_again(node: RunningNode) -> None:
    chunks = names(6)
    with Engine(node) as engine:
        await_true(lambda: engine.tier._parts, "the weights are known")
        assert engine.ask(chunks) == 0
        with node.daemon():
            engine.await_joined()
            assert engine.ask(chunks) == 6
            assert node.stat()["tiers"]["cpu"]["blocks"] == 6
            engine.forget()
            assert engine.ask(chunks) == 6
            assert found_by_tier(node)["cpu"] == 6
            node.await_idle()


def a_daemon_dies_before_the_load(node: RunningNode) -> None:
    chunks = names(6)
    daemon = node.daemon()
    with Engine(node) as engine:
        engine.await_joined()
        engine.ask(chunks)
        node.await_blocks("ssd", 6)
        engine.forget()
        context = engine.begin(chunks)
        submit = engine.tier.submit_load

        def killed_before(job: Any) -> None:
            daemon.kill()
            submit(job)

        engine.tier.submit_load = killed_before
        assert engine.await_found(context, chunks) == 0, "it is computed, and not asked for again"
        engine.end(context)
        engine.tier.submit_load = submit
        with node.daemon():
            engine.await_joined()
            assert engine.ask(chunks) == 6
            node.await_idle()


def a_daemon_hangs(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon() as daemon, Engine(node) as engine:
        engine.await_joined()
        engine.ask(chunks)
        engine.forget()
        context = engine.begin(chunks)
        began_s = time.monotonic()
        with daemon.stopped():
            assert engine.await_found(context, chunks) == 0, "asked in vain"
            assert time.monotonic() < began_s + 5, "once, and not again"
            engine.compute(context, chunks)
            engine.end(context)  # the store ends by its deadline
        assert engine.slowest_s < 0.05, "no lookup waits"

        def finds_them() -> bool:
            engine.forget()
            return engine.ask(chunks) == 6

        await_true(finds_them, "it is asked again")


def memory_is_vllms_after_a_drain(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon() as daemon, Engine(node) as engine, ExitStack() as hung:
        engine.await_joined()
        engine.ask(chunks)
        engine.forget()
        submit = engine.tier.submit_load

        def hang_before(job: Any) -> None:
            hung.enter_context(daemon.stopped())
            submit(job)

        engine.tier.submit_load = hang_before
        context = engine.begin(chunks)
        await_true(lambda: engine.look(context, chunks) is None and engine.manager._jobs, "a load")
        began_s = time.monotonic()
        engine.forget()  # vLLM asserts that no job is left
        assert time.monotonic() < began_s + 12
        engine.rows[:] = 7
        hung.close()
        node.await_idle()
        assert (engine.rows == 7).all(), "nothing comes late"
        engine.tier.submit_load = submit
        engine.end(context)
        await_true(lambda: engine.ask(chunks) == 6, "it goes on")


def wrong_bytes_on_disk_are_missing(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), Engine(node) as engine:
        engine.await_joined()
        engine.ask(chunks)
        node.await_blocks("ssd", 6)
        engine.forget()
        node.drop("cpu")
        wanted = content(chunks[2])[:4096]
        for segment in (node.directory / "ssd").rglob("*"):
            if segment.is_file() and (place := segment.read_bytes().find(wanted)) >= 0:
                with segment.open("r+b") as file:
                    file.seek(place + 100)
                    file.write(bytes(64))
        assert engine.ask(chunks) == 2, "up to the damaged one"
        engine.forget()
        node.drop("cpu")
        assert engine.ask(chunks) == 6, "it was stored again"
        node.await_idle()


def memory_is_let_go_of_while_a_daemon_hangs(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon() as daemon, ExitStack() as hung:
        with Engine(node) as engine:
            engine.await_joined()
            context = engine.begin(chunks)
            assert engine.await_found(context, chunks) == 0
            hung.enter_context(daemon.stopped())
            engine.compute(context, chunks)
            began_s = time.monotonic()
        assert time.monotonic() < began_s + 20


def a_tier_that_is_not_told_the_model(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), logged() as lines, Engine(node, is_told=False) as engine:
        assert [line for line in lines if "use KvtierOffloadingConnector" in line]
        assert engine.ask(chunks) == 0
        engine.forget()
        assert engine.ask(chunks) == 0
        assert not node.stat()["engines"]


def pages_of_another_kind_are_others(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), Engine(node) as one, Engine(node, pages="1x(other)") as other:
        for engine in (one, other):
            engine.await_joined()
        one.ask(chunks)
        assert other.ask(chunks) == 0


def workers_may_tell_late_or_never(node: RunningNode) -> None:
    chunks = names(6)
    with node.daemon(), logged() as lines:
        with Engine(node, pages="") as engine:
            assert engine.ask(chunks) == 0
            engine.pages.set_result("1x(cpu)")
            engine.await_joined()
            engine.forget()
            assert engine.ask(chunks) == 0
            engine.forget()
            assert engine.ask(chunks) == 6
        with Engine(node, pages="") as engine:
            engine.pages.set_exception(ValueError("no such device"))
            await_true(lambda: [line for line in lines if "no such device" in line], "it is said")
            assert engine.ask(chunks) == 0
        with Engine(node, pages="") as engine:
            assert engine.ask(chunks) == 0
        await_true(
            lambda: not [each for each in threading.enumerate() if each.name == "kvtier-open"],
            "nobody waits for workers of a tier that is shut down",
        )


def both_halves(socket: Path) -> tuple[Any, Any]:
    """Make vLLM's connector with ours as its kind: its scheduling half, and that of a worker."""
    tier = {"type": "KvtierTier", "module_path": "kvtier.connectors.vllm_tier"}
    transfer = KVTransferConfig(
        kv_connector="KvtierOffloadingConnector",
        kv_connector_module_path="kvtier.connectors.vllm_tier",
        kv_role="kv_both",
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        kv_connector_extra_config={
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.vllm.host_spec",
            "cpu_bytes_to_use": 16 << 20,
            "secondary_tiers": [tier | {"socket": str(socket)}],
        },
    )
    config = EngineArgs(
        model=str(MODELS / "tiny"), dtype="float32", max_model_len=1024, kv_transfer_config=transfer
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)
    page_bytes = spec.page_size_bytes
    tensor = _make(
        KVCacheTensor,
        size=16 * page_bytes,
        layers=["layer"],
        shared_by=["layer"],  # 0.28
        layer_stride=16 * page_bytes,
        block_stride=page_bytes,
    )
    blocks = _make(
        KVCacheConfig,
        num_blocks=16,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        kv_cache_layout="LBHNC",
    )
    layers = config.compilation_config.static_forward_context
    layers["layer"] = SimpleNamespace(attn_backend=CPUAttentionBackend)
    return (
        KvtierOffloadingConnector(config, KVConnectorRole.SCHEDULER, blocks),
        KvtierOffloadingConnector(config, KVConnectorRole.WORKER, blocks),
    )


def workers_tell_in_the_handshake(node: RunningNode) -> None:
    with node.daemon(), logged() as lines:
        for is_foreign in (False, True):
            scheduling, worker = both_halves(node.socket)
            told = (
                object()
                if is_foreign
                else pickle.loads(pickle.dumps(worker.get_handshake_metadata()))
            )
            scheduling.set_xfer_handshake_metadata_pp_aware({(1, 0): told, (0, 0): told})
            if is_foreign:
                await_true(lambda: [line for line in lines if "MultiConnector" in line], "refused")
            else:
                await_true(lambda: node.stat()["engines"], "the tier is joined")
                assert scheduling._pages.result(0).startswith("2x(CPU_ATTN,"), "of two workers"
            worker.shutdown()
            scheduling.shutdown()
        assert not [line for line in lines if "failed" in line], lines


CASES: Sequence[Callable[[RunningNode], None]] = (
    chunks_come_back_from_each_tier,
    the_front_may_be_with_vllm,
    two_engines_share,
    what_vllm_has_is_offered_again,
    a_daemon_dies_before_the_load,
    a_daemon_hangs,
    memory_is_vllms_after_a_drain,
    wrong_bytes_on_disk_are_missing,
    memory_is_let_go_of_while_a_daemon_hangs,
    a_tier_that_is_not_told_the_model,
    pages_of_another_kind_are_others,
    workers_may_tell_late_or_never,
    workers_tell_in_the_handshake,
)


def main(wanted: Sequence[str]) -> None:
    """Run cases, each with a daemon that has nothing yet."""
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        began_s = time.monotonic()
        with work_directory() as directory:
            case(RunningNode(directory))
        print(f"{case.__name__}: ok in {time.monotonic() - began_s:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
