"""Many engines, small tiers, drops and crashes at once: every byte that comes back is right."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import work_directory
from kvtier.testing.served import Served
from tests.integration.pattern import PatternEngine, in_threads

pytestmark = pytest.mark.slow

NUM_ENGINES = 6
NUM_PROMPTS = 40
SMALL = {"cpu.capacity": "2MiB", "cpu.slab": "256KiB", "ssd.capacity": "8MiB"} | {
    "ssd.segment": "1MiB"
}
"""The prompts take about 10 MiB: nothing holds them all, so each tier evicts all the time."""


@pytest.fixture
def node() -> Iterator[Served]:
    with work_directory() as directory:
        yield Served(directory, SMALL)


class Storm:
    """One engine's random stores and loads; ``PatternEngine`` checks what it loads."""

    def __init__(self, engine: PatternEngine, seed: int, seconds: float) -> None:
        self._engine = engine
        self._choose = random.Random(seed)
        self._end_s = time.monotonic() + seconds
        self.num_loaded = 0
        self.num_stored = 0
        self.num_away = 0

    def run(self) -> None:
        while time.monotonic() < self._end_s:
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
            self.num_stored += self._engine.store(prompt, num_blocks, first)
        else:
            tiers, end = self._engine.load(prompt, num_blocks, first)
            assert end in {"complete", "absent", "failed", "no_room", "late"}, end
            self.num_loaded += len(tiers)


def storms(stack: ExitStack, node: Served, seed: int, seconds: float) -> list[Storm]:
    print(f"seed {seed}")
    return [
        Storm(stack.enter_context(PatternEngine(node.socket)), seed + number, seconds)
        for number in range(NUM_ENGINES)
    ]


def test_engines_that_crowd_small_tiers(node: Served) -> None:
    with node.daemon() as daemon, ExitStack() as stack:
        engines = storms(stack, node, 7, 5)

        def drop() -> None:
            for tier in ("cpu", "ssd", "cpu"):
                node.drop_now(tier)

        work: list[Callable[[], object]] = [engine.run for engine in engines]
        in_threads([*work, drop])
        status = node.await_idle(20)
        num_loaded = sum(engine.num_loaded for engine in engines)
        print(f"{num_loaded} blocks loaded, {sum(e.num_stored for e in engines)} stored")
        assert num_loaded > 100
        assert not any(engine.num_away for engine in engines)
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


def test_daemons_that_crash_under_load(node: Served) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(node.daemon())
        engines = storms(stack, node, 8, 9)

        def crash() -> None:
            running = daemon
            for _ in range(3):
                running.kill()
                running = stack.enter_context(node.daemon())

        in_threads([*[engine.run for engine in engines], crash])
        num_loaded = sum(engine.num_loaded for engine in engines)
        print(f"{num_loaded} blocks loaded, {sum(e.num_away for e in engines)} calls failed open")
        assert num_loaded > 50
        assert all(engine.num_away for engine in engines)
        node.await_idle(20)
        assert node.metric("kvtier_miss_blocks_total", reason="identity") == 0
