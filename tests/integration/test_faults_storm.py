"""Many engines, small tiers, drops and crashes at once: every byte that comes back is right."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine, in_threads

pytestmark = pytest.mark.slow

NUM_ENGINES = 6
NUM_PROMPTS = 40
SMALL = {"cpu.capacity": "2MiB", "cpu.slab": "256KiB", "ssd.capacity": "8MiB"} | {
    "ssd.segment": "1MiB"
}
"""The prompts take about 10 MiB: nothing holds them all, so each tier evicts all the time."""


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory, SMALL)


class Storm:
    """One engine's random stores and loads; ``PatternEngine`` checks what it loads."""

    def __init__(self, engine: PatternEngine, seed: int, is_over: threading.Event) -> None:
        self._engine = engine
        self._choose = random.Random(seed)
        self._is_over = is_over
        self.num_loaded = 0
        self.num_away = 0

    def run(self) -> None:
        while not self._is_over.is_set():
            try:
                self._step()
            except DaemonUnavailable:
                self.num_away += 1
                self._engine.client.wait_attached(0.2)

    def _step(self) -> None:
        prompt = self._choose.randrange(NUM_PROMPTS)
        num_blocks = 1 + prompt % 16 * 4
        first = self._choose.randrange(num_blocks)
        if self._choose.random() < 0.4:
            self._engine.store(prompt, num_blocks, first)
        else:
            tiers, end = self._engine.load(prompt, num_blocks, first)
            assert end in {"complete", "absent", "failed", "no_room", "late"}, end
            self.num_loaded += len(tiers)


class Storms:
    """Engines in a storm that lasts until ``work`` is done."""

    def __init__(self, stack: ExitStack, node: RunningNode, seed: int) -> None:
        print(f"seed {seed}")
        self._is_over = threading.Event()
        self.engines = [
            Storm(stack.enter_context(PatternEngine(node.socket)), seed + number, self._is_over)
            for number in range(NUM_ENGINES)
        ]

    @property
    def num_loaded(self) -> int:
        return sum(engine.num_loaded for engine in self.engines)

    def await_loaded(self, count: int) -> None:
        """Wait until so many more blocks have been loaded."""
        wanted = self.num_loaded + count
        await_true(lambda: self.num_loaded >= wanted, f"{count} blocks are loaded", 60)

    def during(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._is_over.set()

        in_threads([*[engine.run for engine in self.engines], run], 100)
        print(f"{self.num_loaded} blocks loaded")


def test_engines_that_crowd_small_tiers(node: RunningNode) -> None:
    with node.daemon() as daemon, ExitStack() as stack:
        storms = Storms(stack, node, 7)

        def drop() -> None:
            for tier in ("cpu", "ssd", "cpu", "cpu", "ssd"):
                storms.await_loaded(400)
                node.drop_now(tier)

        storms.during(drop)
        status = node.await_idle(20)
        assert not any(engine.num_away for engine in storms.engines)
        assert status["transfers"]["ssd_to_cpu"]["bytes"] > 0
        assert node.metric("kvtier_evicted_blocks_total", tier="cpu") > 0
        assert node.metric("kvtier_evicted_blocks_total", tier="ssd") > 0
        assert node.metric("kvtier_miss_blocks_total", reason="checksum") == 0
        assert status["tiers"]["cpu"]["used_bytes"] <= status["tiers"]["cpu"]["capacity_bytes"]
        used = sum(path.stat().st_size for path in (node.directory / "ssd").iterdir())
        assert used <= 8 << 20
        assert sum(node.drop("cpu", "ssd").values()) > 0
        tiers = node.await_idle()["tiers"]
        assert [tiers[name]["blocks"] for name in ("cpu", "ssd")] == [0, 0]
        assert tiers["cpu"]["used_bytes"] == 0, "no slot is lost"
        assert "Traceback" not in daemon.log
        assert daemon.stop() == 0


def test_daemons_that_crash_under_load(node: RunningNode) -> None:
    with ExitStack() as stack:
        daemons = [stack.enter_context(node.daemon())]
        storms = Storms(stack, node, 8)

        def crash() -> None:
            for _ in range(3):
                storms.await_loaded(100)
                daemons[-1].kill()
                daemons.append(stack.enter_context(node.daemon()))
            storms.await_loaded(100)

        storms.during(crash)
        assert any(engine.num_away for engine in storms.engines)
        node.await_idle(20)
        assert node.metric("kvtier_miss_blocks_total", reason="identity") == 0
        daemons[-1].kill()
    print(f"fsck: {node.fsck()}")
    assert node.fsck("--repair")[0] == 0
    assert node.fsck()[0] == 0
