"""What a real server shows of kvtier, in its metrics and in its log."""

from collections import Counter
from collections.abc import Callable

from deploy.source.vllm import ROWS
from kvtier.testing.child import await_true
from kvtier.testing.running_node import RunningNode, fetch
from kvtier.testing.vllm_server import VllmServer
from tests.deploy.replayed import assert_tells
from tests.vllm.servers import (
    BLOCK_TOKENS,
    ON_EACH,
    ON_FIRST,
    RELEASES,
    STARTED,
    ask,
    await_stored,
    prompt,
    running,
)

pytestmark = STARTED

SOURCES = {"cpu": "host", "ssd": "disk", "remote": "external_unspecified"}
"""What vLLM 0.32 calls the three tiers."""


def counts(vllm: VllmServer) -> Counter[str]:
    """Return vLLM's own count of tokens, and ours by tier, by source, and by block."""
    found: Counter[str] = Counter(tokens=int(vllm.hit_tokens()))
    for tier, source in SOURCES.items():
        found[tier] = count(vllm, "vllm:kvtier_hit_tokens", tier=tier)
        found[source] = count(vllm, "vllm:prompt_tokens_cached_by_source", source=source)
    for name in ("load_bytes", "missing_blocks"):
        found[name] = count(vllm, f"vllm:kvtier_{name}")
    found["kept"] = count(vllm, "vllm:kvtier_store_blocks", outcome="kept")
    return found


def count(vllm: VllmServer, name: str, **labels: str) -> int:
    return int(vllm.metric(f"{name}_total", **labels))


@ON_EACH
def test_its_counts_agree_with_those_of_vllm(vllm: VllmServer, served: RunningNode) -> None:
    asked, before = prompt(301), counts(vllm)
    with running(served):
        vllm.ask(asked)
        await_stored(served, 4, *SOURCES)
        for dropped in ((), ("cpu",), ("cpu", "ssd")):
            served.drop(*dropped)
            ask(vllm, served, asked)  # a busy machine may be late with any of them, and computes
        found = counts(vllm)
        found.subtract(before)
        by_tier = [found[tier] for tier in SOURCES]
        assert sum(by_tier) == found["tokens"] > 0
        by_source = [found[source] for source in SOURCES.values()]
        assert by_source in (by_tier, [0, 0, 0]), "older releases do not tell sources"
        block_bytes = served.stat()["tiers"]["cpu"]["used_bytes"] // 4
        num_blocks = found["load_bytes"] / block_bytes + found["missing_blocks"]
        assert num_blocks * BLOCK_TOKENS == found["tokens"]
        assert found["kept"] >= 4
        assert vllm.metric("vllm:kvtier_attached") == 1
        assert_tells(fetch(f"http://{vllm.url}/metrics").decode(), ROWS)
        await_true(lambda: _is_told_of_cache(served), "the daemon knows what vLLM has cached")
        (gpu,) = served.drop_now("gpu")
        (keeping,) = gpu.keeping
        assert keeping.engine.endswith("scheduler"), "once, though its worker is told as well"
        assert "POST /reset_prefix_cache" in keeping.why
    await_true(lambda: _is_told_of_absence(vllm, asked), "it is seen that the daemon went")
    assert "kvtier: vLLM's blocks are offered to the daemon" in vllm.child.log
    assert "kvtier: attached socket=" in vllm.child.log
    await_true(lambda: _has_logged(vllm, asked), "its line of the last ten seconds", 30)


def _is_told_of_cache(served: RunningNode) -> bool:
    gpu = served.stat()["tiers"]["gpu"]
    return bool(0 < gpu["used_bytes"] < gpu["capacity_bytes"] and gpu["tokens"])


@ON_FIRST
def test_one_that_is_idle_from_its_start_tells_of_its_session(
    served: RunningNode, start: Callable[..., VllmServer]
) -> None:
    with served.daemon(), start(RELEASES[0], "tiny", served.socket.parent) as idle:
        idle.await_ready()
        await_true(lambda: idle.metric("vllm:kvtier_attached") == 1, "it is told")


def _has_logged(vllm: VllmServer, asked: list[int]) -> bool:
    vllm.ask(asked, 1)
    return "KV Transfer metrics: " in vllm.child.log


def _is_told_of_absence(vllm: VllmServer, asked: list[int]) -> bool:
    vllm.ask(asked, 1)  # a step
    return vllm.metric("vllm:kvtier_attached") == 0
