"""The time of day leaps under a running daemon, by days, both ways: nothing but ages go by it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client import LoadedBlock
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from tests.integration.pattern import PatternEngine
from tests.programs import faketime_library

pytestmark = pytest.mark.slow

DAY_S = 86_400


class Leaping(RunningNode):
    """A node whose daemon's time of day is ahead of ours, or behind it, by what a file says."""

    def __init__(self, directory: Path) -> None:
        self.offset = directory / "offset"
        environment = {
            "LD_PRELOAD": faketime_library(),
            "FAKETIME_TIMESTAMP_FILE": str(self.offset),
            "FAKETIME_CACHE_DURATION": "1",  # seconds until the file is looked at again
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        super().__init__(directory, {"ssd.max_age": "12h"}, environment)
        self.write(0)

    def write(self, offset_s: int) -> None:
        fresh = self.offset.with_suffix(".new")
        fresh.write_text(f"{offset_s:+d}\n")
        fresh.replace(self.offset)

    def leap(self, offset_s: int) -> None:
        """Have the clock leap, and the daemon live on with it for a second."""
        self.write(offset_s)

        def has_leapt() -> float | None:
            told = self.stat()
            is_there = abs(told["time_s"] - time.time() - offset_s) < DAY_S / 24
            return float(told["uptime_s"]) if is_there else None

        since_s = await_true(has_leapt, "its clock has leapt")
        await_true(lambda: (has_leapt() or 0) > since_s + 1, "it has gone on")

    def assert_well(self) -> None:
        tiers = self.await_idle()["tiers"]
        assert [tiers[name]["state"] for name in ("cpu", "ssd")] == ["up", "up"], tiers
        assert fetch(f"http://127.0.0.1:{self.http_port}/healthz")


@pytest.fixture
def node() -> Iterator[Leaping]:
    with work_directory() as directory:
        yield Leaping(directory)


def test_the_time_of_day_leaps(node: Leaping) -> None:
    leases: list[int] = []

    def leap_once(_block: LoadedBlock) -> None:
        if not leases:
            node.leap(2 * DAY_S)
            leases.append(node.stat()["leases"])

    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_blocks("ssd", 4)
        assert engine.load(1, on_block=leap_once) == (["cpu"] * 4, "complete")
        assert leases == [1], "it is held on"
        for prompt in (2, 3):
            assert engine.store(prompt) == 4, "it is attached still"
            node.assert_well()
            node.drop("cpu")
            assert engine.load(prompt) == (["ssd"] * 4, "complete")
            node.leap(-2 * DAY_S)
        assert daemon.stop() == 0, daemon.log
        assert "level=warning" not in daemon.log
    with node.daemon(), PatternEngine(node.socket) as engine:
        for prompt in (2, 3):
            tiers, end = engine.load(prompt)
            assert (tiers, end) == (["ssd"] * 4, "complete"), "of the future, and as good as any"
