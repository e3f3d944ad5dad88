"""Tokens asked, found, loaded, used and computed add up: real daemon, integrated engine."""

from collections import Counter

import pytest
from prometheus_client import CollectorRegistry

from kvtier.engine.metrics import EngineMetrics
from kvtier.engine.model import LoadedModel
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ASKED_TOKENS,
    FOUND_TOKENS,
    LEFT_TOKENS,
    LOADED_TOKENS,
    ORDERED_TOKENS,
    TRANSFER_BYTES,
    UNLOADED_TOKENS,
)
from kvtier.observe.engine_metrics import (
    PROMPT_TOKENS,
)
from kvtier.observe.metrics import Metric
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from tests.engine.attached import BLOCK_TOKENS, AttachedEngine, attached
from tests.engine.drive import prompt

pytestmark = pytest.mark.slow

FULL = 5 * BLOCK_TOKENS
LENGTH = FULL + 20


def by(node: RunningNode, metric: Metric, **fixed: str) -> dict[str, int]:
    """Return the daemon's counts that are not 0, by the first label."""
    label, values = metric.labels[0]
    counts = {each: int(node.metric(metric.name, **fixed, **{label: each})) for each in values}
    return {each: count for each, count in counts.items() if count}


def used_by(engine: AttachedEngine) -> dict[str, int]:
    """Return what the engine would tell Prometheus of its prompts, by source."""
    metrics = EngineMetrics(CollectorRegistry())
    snapshot = engine.runner.call(lambda each: each.snapshot())
    metrics.update(snapshot, [], is_ready=True, is_attached=True)
    values = dict(PROMPT_TOKENS.labels)["source"]
    registry = metrics.metrics.registry
    counts = {s: registry.get_sample_value(PROMPT_TOKENS.name, {"source": s}) for s in values}
    return {source: int(count) for source, count in counts.items() if count}


def total(node: RunningNode, metric: Metric) -> int:
    return int(node.metric(metric.name))


def test_every_token_is_somewhere(tiny: LoadedModel, redis_server: str) -> None:
    asked_for = Counter[str]()
    with work_directory() as directory:
        node = RunningNode(directory, {"remote.url": redis_server, "remote.key_prefix": "books:"})
        with node.daemon(), attached(tiny, node.socket) as engine:

            def ask(num_tokens: int = LENGTH, seed: int = 1, **more: int) -> None:
                answer = engine.complete(prompt(num_tokens, seed), **more)
                asked_for.update(answer.tiers)
                node.await_idle()

            ask()
            ask()  # from the GPU: nothing is asked of the daemon
            for dropped in ((), ("cpu",), ("cpu", "ssd")):
                engine.forget()
                node.drop(*dropped) if dropped else None
                ask()
            engine.forget()
            ask(max_load_tokens=2 * BLOCK_TOKENS)
            engine.forget()
            ask(LENGTH - BLOCK_TOKENS)
            ask(4 * LENGTH // 3, seed=3)
            ask(BLOCK_TOKENS - 1, seed=4)  # no full block: nothing to ask for

            used = used_by(engine)
            found, loaded = by(node, FOUND_TOKENS), by(node, LOADED_TOKENS)
            left, unloaded = by(node, LEFT_TOKENS), by(node, UNLOADED_TOKENS)
            asked, absent = total(node, ASKED_TOKENS), total(node, ABSENT_TOKENS)
            print(f"asked {asked} found {found} absent {absent} left {left}")
            print(f"ordered {total(node, ORDERED_TOKENS)} loaded {loaded} used {used}")
            assert found == {"cpu": FULL + FULL + FULL - 64, "ssd": FULL, "remote": FULL}
            assert asked == sum(found.values()) + absent
            assert left == {"limit": FULL - 2 * BLOCK_TOKENS}
            assert total(node, ORDERED_TOKENS) == sum(found.values()) - sum(left.values())
            assert total(node, ORDERED_TOKENS) == sum(loaded.values())
            assert unloaded == {}
            # What the engine says it used is what the daemon says it handed out.
            assert used == asked_for
            assert {tier: used[tier] for tier in loaded} == loaded
            never_asked = asked_for.total() - asked_for["gpu"] - asked
            assert used["computed"] == never_asked + absent + left["limit"]
            # And the bytes are those of the tokens.
            copied = by(node, TRANSFER_BYTES, outcome="complete")
            token_bytes = 2 * tiny.num_layers * tiny.num_kv_heads * tiny.head_dim * 4
            assert copied["cpu_to_gpu"] == sum(loaded.values()) * token_bytes
            assert copied["ssd_to_cpu"] == loaded["ssd"] * token_bytes
            assert copied["remote_to_cpu"] == loaded["remote"] * token_bytes
            assert copied["gpu_to_cpu"] == copied["cpu_to_ssd"] == copied["cpu_to_remote"]
