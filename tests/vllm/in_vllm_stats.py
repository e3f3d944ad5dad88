"""Run by the Python of an environment with vLLM: counts go the way that vLLM has for them.

From the halves, pickled between processes, packed to the process with ``/metrics``, and there into
the log and into Prometheus; alone and as one of several connectors.
"""

import pickle
from types import SimpleNamespace
from typing import Any

import vllm
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.plugins import load_general_plugins
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvtier.connectors.vllm.messages import KvtierStats
from kvtier.connectors.vllm.stats import HIT_TOKENS, LOAD_SECONDS, LOOKUPS, StatCounters

NAME = "KvtierConnector"


def stats() -> Any:
    counters = StatCounters()
    counters.add(HIT_TOKENS, 512, "cpu")
    counters.add(LOOKUPS, label="hit")
    counters.add(LOAD_SECONDS, 0.013)
    of_worker = pickle.loads(pickle.dumps(KvtierStats.of(counters.take())))
    counters.add(LOOKUPS, label="miss")
    assert KvtierStats.of(counters.take()).aggregate(of_worker) is not of_worker
    assert not of_worker.is_empty()
    return of_worker


def sent(told: Any) -> Any:
    """Return what the process with ``/metrics`` gets."""
    inner = told.to_dict() if hasattr(told, "to_dict") else told.data
    outputs = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=inner))
    decoder = MsgpackDecoder(EngineCoreOutputs)
    return decoder.decode(MsgpackEncoder().encode(outputs)).scheduler_stats.kv_connector_stats


def lines(transfer: Any, got: Any) -> list[str]:
    log, said = KVConnectorLogging(transfer), []
    for _ in range(2):
        log.observe(got)
    log.log(lambda form, text: said.append(form % text))
    return said


def series(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "m"} | labels)


def check_alone() -> None:
    transfer = KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(transfer).__name__ == NAME
    got = sent(stats())
    wanted = "Tokens from cpu=1024, Lookups hit=2, Avg load (ms)=13.0, Max load (ms)=13.0"
    assert lines(transfer, got) == [f"KV Transfer metrics: {wanted}"]
    config = SimpleNamespace(kv_transfer_config=transfer)
    prometheus = KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    for _ in range(2):
        prometheus.observe(got, 1)
    prometheus.observe({"nonsense": {"": [1]}}, 1)
    assert series("vllm:kvtier_hit_tokens_total", engine="1", tier="cpu") == 1024
    assert series("vllm:kvtier_hit_tokens_total", engine="0", tier="ssd") == 0
    assert series("vllm:kvtier_load_seconds_count", engine="1") == 2
    assert series("vllm:kvtier_attached", engine="0") == 0


def check_among_others() -> None:
    child = {"kv_connector": NAME, "kv_role": "kv_both"}
    several = {"connectors": [child]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=several
    )
    said = lines(transfer, sent(MultiKVConnectorStats(data={NAME: stats()})))
    assert "'Tokens from cpu': 1024" in said[0], said


load_general_plugins()  # as each of vLLM's processes does
check_alone()
check_among_others()
print(f"{vllm.__version__}: ok")
