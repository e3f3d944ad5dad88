"""``kvtier probe`` that is interrupted, asked twice, or asked of a daemon that stands still."""

import json
import signal
import threading
from collections.abc import Iterator

import pytest

from kvtier.testing.child import Child, await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.shim.storage import Call, StorageShim, delay

pytestmark = pytest.mark.slow

Scene = tuple[RunningNode, StorageShim, Child]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """One daemon for all: each test leaves it as it was, but for some blocks."""
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        settings = {"ssd.capacity": "256MiB", "ssd.segment": "16MiB", "ssd.scrub_rate": "0B"}
        node = RunningNode(directory, settings, shim.environment)
        with node.daemon() as daemon:
            yield node, shim, daemon


def probe(node: RunningNode, name: str, *options: str) -> Child:
    words = kvtier_command("probe", "--connect", str(node.socket), "--tier", "ssd", *options)
    return Child(words, node.directory / f"{name}.log")


def blocks(node: RunningNode) -> int:
    """Return what the tier holds once nothing is on its way."""
    num_blocks: int = node.await_idle()["tiers"]["ssd"]["blocks"]
    return num_blocks


def written(node: RunningNode) -> int:
    """Return what was ever written to the tier."""
    detail = node.stat()["tiers"]["ssd"]["detail"]
    return int(detail["written_metadata_bytes"])


def measured(child: Child) -> int:
    """Return how many rounds a probe that was asked for JSON has measured."""
    assert child.wait(60) == 0, child.log
    return len(json.loads(child.log.splitlines()[-1])["tiers"]["ssd"]["rounds"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_one_that_is_interrupted_leaves_nothing(scene: Scene, number: signal.Signals) -> None:
    node, shim, daemon = scene
    with PatternEngine(node.socket) as engine:
        assert engine.store(1) == 4
        num_blocks = blocks(node)
        before = written(node)
        shim.set({Call.READ: delay(300)})
        with probe(node, "interrupted") as child:
            await_true(lambda: written(node) > before, "it measures", 60)
            child.send(number)
            assert child.wait() == (130 if number is signal.SIGINT else -9)
            assert "Traceback" not in child.log
        assert engine.load(1) == (["cpu"] * 4, "complete"), "others are served meanwhile"
        shim.clear()
        node.drop("cpu")
        assert engine.load(1) == (["ssd"] * 4, "complete")
        with probe(node, "again", "--json") as child:
            assert measured(child) > 0
        assert blocks(node) == num_blocks
        assert "Traceback" not in daemon.log


def test_two_at_once_take_turns(scene: Scene) -> None:
    node, _shim, _daemon = scene
    num_blocks = blocks(node)
    with probe(node, "one", "--json") as one, probe(node, "other", "--json") as other:
        assert measured(one) > 0
        assert measured(other) > 0
    assert blocks(node) == num_blocks


def test_one_while_requests_go_on(scene: Scene) -> None:
    node, _shim, _daemon = scene
    is_over = threading.Event()
    with PatternEngine(node.socket) as engine, probe(node, "busy", "--json") as child:
        asked = threading.Thread(target=lambda: (child.wait(60), is_over.set()))
        asked.start()
        for number in range(10_000):
            if is_over.is_set():
                break
            engine.store(number % 40, 8)
            assert engine.load(number % 40, 8) == (["cpu"] * 8, "complete")
        asked.join(60)
        assert measured(child) > 0


def test_a_daemon_that_stands_still_is_said_to(scene: Scene) -> None:
    node, _shim, daemon = scene
    with daemon.stopped(), probe(node, "frozen") as child:
        assert child.wait(30) == 2
        assert "did not answer in time" in child.log
    with probe(node, "thawed", "--json") as child:
        assert measured(child) > 0


def test_a_full_store_keeps_its_blocks_and_its_earlier_figures() -> None:
    """Segments fill the capacity but for 64 KiB: nothing can be measured once they are there."""
    with work_directory() as directory:
        settings = {"ssd.capacity": "8576KiB", "ssd.segment": "4MiB", "cpu.capacity": "8MiB"}
        node = RunningNode(directory, settings)
        with node.daemon(), PatternEngine(node.socket) as engine:
            with probe(node, "empty", "--json") as child:
                num_rounds = measured(child)
                assert num_rounds > 0
            for number in range(100):
                engine.store(number, 8)
                node.await_idle()
            num_blocks = blocks(node)
            with probe(node, "full", "--json") as child:
                assert child.wait(60) == 1
                told = json.loads(child.log.splitlines()[-1])["tiers"]["ssd"]
            assert told["is_kept"]
            assert len(told["rounds"]) == num_rounds
            assert blocks(node) == num_blocks
            assert list(node.stat()["cost"]["unmeasured"]) == ["ssd"]
            assert node.stat()["tiers"]["ssd"]["detail"]["segments"] == 2
