"""What is written below the CPU tier, when, and what a stop, a crash and a budget make of that."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvtier.api.rpc.operator_client import local_operator
from kvtier.core.request import RequestTraits
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import engine_pb2
from kvtier.v1 import operator_pb2 as pb
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

CPU_BLOCKS = 512

DEMOTED = {"ssd.write": "demote", "cpu.capacity": "4MiB", "cost.probe": "off"}


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory, DEMOTED)


def ssd_blocks(node: RunningNode) -> int:
    blocks: int = node.stat()["tiers"]["ssd"]["blocks"]
    return blocks


def fill(engine: PatternEngine, num_blocks: int, first: int = 1000) -> None:
    """Store so many blocks that nobody asks for again."""
    for prompt in range(first, first + num_blocks // 8):
        assert engine.store(prompt, 8) == 8


def pin(node: RunningNode, engine: PatternEngine, prompt: int, num_blocks: int, ttl_s: int) -> int:
    """Pin a prompt; returns how many of its blocks are kept."""
    chain = engine_pb2.Chain(
        tenant=engine.tenant, hashes=b"".join(engine.chain(prompt, num_blocks))
    )
    request = pb.PinRequest(key_space=engine.space.digest, chain=chain, ttl_s=ttl_s)
    with local_operator(node.socket, 10) as stub:
        return int(stub.Pin(request, timeout=10).blocks)


def test_a_block_is_written_when_it_has_to_go_and_read_back_from_there(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.ask(1, 8)
        assert engine.store(1, 8) == 8
        node.await_idle()
        assert ssd_blocks(node) == 0
        fill(engine, 2 * CPU_BLOCKS)
        node.await_idle()
        assert ssd_blocks(node) > CPU_BLOCKS // 2
        tiers, end = engine.load(1, 8)
        assert (set(tiers), end) == ({"ssd"}, "complete")
        document = node.stat()
        assert document["worth"]["refused_blocks"]["ssd"].get("full", 0) < CPU_BLOCKS // 4
        assert document["policy"]["gates"]["ssd"]["taken_blocks"] >= ssd_blocks(node)


def test_a_stop_writes_what_the_gate_takes_and_a_restart_finds_it(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        fill(engine, 160)
        assert ssd_blocks(node) == 0
        assert daemon.stop() == 0
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert ssd_blocks(node) == 160
        assert engine.load(1000, 8) == (["ssd"] * 8, "complete")


def test_a_stop_writes_nothing_where_the_gate_is_shut(node: RunningNode) -> None:
    with node.daemon(ssd__gate=0) as daemon, PatternEngine(node.socket) as engine:
        fill(engine, 160)
        assert daemon.stop() == 0
    with node.daemon():
        assert ssd_blocks(node) == 0


def test_a_tier_that_is_not_kept_leaves_nothing_behind(node: RunningNode) -> None:
    with node.daemon(ssd__keep="false") as daemon, PatternEngine(node.socket) as engine:
        fill(engine, 2 * CPU_BLOCKS)
        await_true(lambda: ssd_blocks(node) > CPU_BLOCKS // 2, "it is used like any other")
        assert daemon.stop() == 0
        assert not segments(node)
    with node.daemon(ssd__keep="false") as daemon, PatternEngine(node.socket) as engine:
        fill(engine, 2 * CPU_BLOCKS)
        await_true(lambda: ssd_blocks(node) > CPU_BLOCKS // 2, "it is used like any other")
        daemon.kill()
        assert segments(node)
    with node.daemon(ssd__keep="false"):
        assert not segments(node), "what a crash leaves is removed by the next start"


def segments(node: RunningNode) -> list[Path]:
    return list((node.directory / "ssd").glob("*.segment"))


def test_a_crash_loses_nothing_that_was_here_longer_than_flush_after(node: RunningNode) -> None:
    with node.daemon(ssd__flush_after="1s") as daemon, PatternEngine(node.socket) as engine:
        fill(engine, 80)
        node.await_blocks("ssd", 80)
        daemon.kill()
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert ssd_blocks(node) == 80
        assert engine.load(1000, 8) == (["ssd"] * 8, "complete")


def test_a_write_budget_lowers_the_gate_and_with_it_what_is_written(node: RunningNode) -> None:
    with node.daemon(ssd__write_budget="32MiB"), PatternEngine(node.socket) as engine:
        # An hour's share of it is less than a hundredth of what comes in each second.
        await_true(lambda: gate_share(node) == 0.75, "the gate is as configured")
        fill(engine, 4 * CPU_BLOCKS)
        await_true(lambda: gate_share(node) < 0.2, "the gate is lowered")
        state = partial(node.metric, "kvtier_ssd_write_budget_state")
        await_true(lambda: state(state="short") == 1, "it is said to be short")
        assert state() == 1
        assert node.metric("kvtier_ssd_write_budget_bytes") == 32 << 20
        assert 0 < node.metric("kvtier_ssd_write_budget_left_bytes") < 32 << 20
        node.await_idle()
        before = ssd_blocks(node)
        fill(engine, 4 * CPU_BLOCKS, first=9000)
        node.await_idle()
        assert ssd_blocks(node) - before < CPU_BLOCKS
        assert node.metric("kvtier_refused_blocks_total", tier="ssd", rule="budget") > CPU_BLOCKS


def gate_share(node: RunningNode) -> float:
    return node.metric("kvtier_gate_share")


def test_a_configured_depth_is_exact_and_a_request_overrides_it(node: RunningNode) -> None:
    with node.daemon(policy__max_offload_tokens=10), PatternEngine(node.socket) as engine:
        assert engine.ask(1, 8).max_offload_tokens == 8  # whole blocks of 4
        assert engine.store(1, 8) == 2
        assert engine.lookup(1, 8) == (["cpu"] * 2, "absent")
        assert node.metric("kvtier_refused_blocks_total", tier="cpu", rule="depth") == 6
        for wished, stored in ((0, 0), (3, 0), (23, 5), (1000, 8)):
            traits = RequestTraits(max_offload_tokens=wished)
            prompt = 100 + wished
            assert engine.ask(prompt, 8, traits).max_offload_tokens == wished // 4 * 4
            assert engine.store(prompt, 8, traits=traits) == stored


def test_answers_are_kept_unless_told_otherwise_and_then_with_the_next_turn(
    node: RunningNode,
) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert engine.store(1, 8, num_prompt_blocks=5) == 8
    with node.daemon(policy__answers="false"), PatternEngine(node.socket) as engine:
        assert engine.store(2, 8, num_prompt_blocks=5) == 5
        assert engine.lookup(2, 8) == (["cpu"] * 5, "absent")
        assert engine.store(2, 8, first=5, num_prompt_blocks=8) == 3
        assert engine.load(2, 8) == (["cpu"] * 8, "complete")


def test_second_use_writes_what_is_asked_for_again() -> None:
    with work_directory() as directory:
        node = RunningNode(directory, DEMOTED | {"ssd.write": "second_use"})
        with node.daemon(), PatternEngine(node.socket) as engine:
            for prompt in (1, 2):
                engine.ask(prompt, 8, RequestTraits(request_id=f"first-{prompt}"))
                assert engine.store(prompt, 8) == 8
            node.await_idle()
            assert ssd_blocks(node) == 0
            engine.ask(1, 8, RequestTraits(request_id="again"))
            node.await_blocks("ssd", 8)


@pytest.mark.parametrize("eviction", ["rd-sec", "rd", "credit-lru", "s3-fifo", "lru"])
def test_a_pin_survives_pressure_under_every_policy(node: RunningNode, eviction: str) -> None:
    with node.daemon(policy__eviction=eviction), PatternEngine(node.socket) as engine:
        assert engine.store(1, 8) == 8
        assert pin(node, engine, 1, 8, 600) == 8
        for prompt in range(1000, 1080):
            engine.ask(prompt, 8)
            engine.store(prompt, 8)
        assert engine.lookup(1, 8) == (["cpu"] * 8, "complete")
        assert node.stat()["policy"]["retained_bytes"] == 8 * 8192
        await_true(lambda: node.metric("kvtier_retained_bytes") == 8 * 8192, "a gauge says so")
        assert pin(node, engine, 1, 8, 0) == 0
        assert node.stat()["policy"]["retained_bytes"] == 0


def test_pins_up_to_the_budget_keep_no_store_out(node: RunningNode) -> None:
    with node.daemon(policy__pin_share=0.5), PatternEngine(node.socket) as engine:
        fill(engine, CPU_BLOCKS)
        kept = sum(pin(node, engine, 1000 + number, 8, 600) for number in range(64))
        assert kept == CPU_BLOCKS  # some of them are given up again for the later ones
        assert node.stat()["policy"]["retained_bytes"] <= 2 << 20
        fill(engine, 2 * CPU_BLOCKS, first=5000)
        for prompt in range(1040, 1064):
            assert engine.load(prompt, 8) == (["cpu"] * 8, "complete")
