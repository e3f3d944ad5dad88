"""Blocks that a client has brought up and kept, against a real daemon."""

import time
from collections.abc import Iterator

import pytest

from kvtier.client import ClientDeadlines, HeldBlocks
from kvtier.errors import DaemonSlow, DaemonUnavailable
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def hold(engine: PatternEngine, prompt: int, num_blocks: int = 4, first: int = 0) -> HeldBlocks:
    return engine.client.hold(engine.tenant, engine.chain(prompt, num_blocks), first)


def tiers(held: HeldBlocks) -> list[str]:
    return [tier.value for tier in held.tiers]


def test_what_is_held_stays_until_it_is_released(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_idle()
        held = hold(engine, 1)
        assert (tiers(held), held.end) == (["cpu"] * 4, "complete")
        assert held.good_until_s > time.monotonic()
        assert (node.stat()["leases"], node.stat()["pins"]) == (1, 4)
        assert engine.load(1) == (["cpu"] * 4, "complete")
        for _ in range(2):
            held.release()
        node.await_idle()


def test_blocks_are_brought_up_and_a_short_run_is_kept(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_idle()
        node.drop("cpu")
        held = hold(engine, 1, 6, first=1)
        assert (tiers(held), held.end) == (["ssd"] * 3, "absent")
        assert node.stat()["pins"] == 3
        assert engine.load(1, first=1) == (["cpu"] * 3, "complete"), "they lie there now"
        held.release()
        node.await_idle()


def test_nothing_found_is_nothing_held(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        held = hold(engine, 1)
        assert (tiers(held), held.end) == ([], "absent")
        node.await_idle()
        held.release()


def test_what_is_corrupt_is_not_held_and_is_told_of(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_idle()
        node.drop("ssd")
        slots: list[memoryview] = []
        engine.load(1, on_block=lambda block: slots.append(block.payload))
        slots[2][100] ^= 1
        slots.clear()
        held = hold(engine, 1)
        assert (tiers(held), held.end) == (["cpu"] * 2, "corrupt")
        assert node.stat()["pins"] > 0
        held.release()
        node.await_idle()
        assert engine.lookup(1) == (["cpu"] * 2, "absent"), "the corrupt one is forgotten"
        assert node.metric("kvtier_miss_blocks_total", tier="cpu", reason="checksum") == 1


def test_a_daemon_that_comes_back_does_not_wait_for_what_is_held(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.client.keeper._CLOSE_TIMEOUT_S", 60)
    daemon = node.daemon()
    with daemon, PatternEngine(node.socket) as engine:
        engine.store(1)
        held = hold(engine, 1)
        assert tiers(held)
        daemon.kill()
        await_true(lambda: not engine.client.is_attached, "it is noticed")
        with node.daemon():
            start_s = time.monotonic()
            assert engine.client.wait_attached(30), "sooner than calls under way would be given up"
            print(f"attached again after {time.monotonic() - start_s:.2f} s")
            held.release()  # to one that is gone
            engine.store(2)
            node.await_idle()


def test_a_daemon_that_hangs_is_waited_for_no_longer_than_said(node: RunningNode) -> None:
    deadlines = ClientDeadlines(5, 10, 10, reconnect_s=30)
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=deadlines) as engine:
        engine.store(1)
        held = hold(engine, 1)
        with daemon.stopped():
            start_s = time.monotonic()
            with pytest.raises(DaemonSlow):
                engine.client.hold(engine.tenant, engine.chain(1, 4), 0, timeout_s=0.3)
            held.release()
            assert time.monotonic() - start_s < 5
            with pytest.raises(DaemonUnavailable, match="a moment ago"):
                hold(engine, 1)
        node.await_idle()  # both leases are gone: one was released, of the other nobody heard


def test_a_lease_ends_by_itself(node: RunningNode) -> None:
    deadlines = ClientDeadlines(5, 2, 5, 0.1)
    with (
        node.daemon(daemon__lease="300ms"),
        PatternEngine(node.socket, deadlines=deadlines) as engine,
    ):
        engine.store(1)
        node.await_idle()
        held = hold(engine, 1)
        assert tiers(held)
        node.await_idle()
        assert time.monotonic() > held.good_until_s, "the daemon kept it for as long as said"
        held.release()


def test_a_client_that_ends_lets_go_of_what_it_holds(node: RunningNode) -> None:
    with node.daemon():
        with PatternEngine(node.socket) as engine:
            engine.store(1)
            held = hold(engine, 1)
        node.await_idle()
        held.release()
