"""An hour of a small node's life in minutes: nothing grows, stays held or is forgotten.

The first fifth has the restarts of the daemon, so that the other four are one process, which is
compared with itself: its second fifth with its last one. In between a client is killed and replaced
every few seconds, and the server behind the remote tier is frozen and restarted empty.
``KVTIER_SOAK_MINUTES`` makes it longer.
"""

import itertools
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.redis_child import RedisServer

MINUTES = float(os.environ.get("KVTIER_SOAK_MINUTES", "1.25"))
ROOT = Path(__file__).parents[2]
SEED = 20_000
NUM_CUSTOMERS = 3
LOOK_S = 0.25

SETTINGS = {
    "cpu.capacity": "4MiB",
    "cpu.slab": "256KiB",
    "ssd.capacity": "12MiB",
    "ssd.segment": "1MiB",
    "ssd.scrub_rate": "4MiB",
    "ssd.deadline": "1s",
    "remote.min_tokens": 0,
    "daemon.lease": "5s",
}
"""All prompts take about 20 MiB: no tier holds them, and the SSD reclaims all the time."""

SERVER_MEMORY = "16mb"

RSS_GROWTH_MAX_BYTES = 8 << 20
"""What the allocator may keep more at the end. There are about 5,000 calls between the two fifths,
so that a leak of two kilobytes a call shows; of less, in a longer run."""

FILES_GROWTH_MAX = 6
THREADS_GROWTH_MAX = 4
"""A client that attaches just then has some."""

HIT_RATE_LOSS_MAX = 0.05
"""The server was emptied in between, and prompts come by chance."""

EXPECTED = re.compile(
    r"level=info |"
    r'level=warning .* event="(tier is out|tier call failed|tier health check failed|'
    r'server has no maxmemory.*)"'
)
"""What the log may say of a node that lost its server for a while."""


@dataclass(frozen=True)
class Look:
    """One reading of the daemon."""

    at_s: float
    rss_bytes: int
    num_files: int
    num_threads: int


class Crowd:
    """Customers of a node, some of whom are killed and replaced."""

    def __init__(self, node: RunningNode, stack: ExitStack) -> None:
        self._node = node
        self._stack = stack
        self._choose = random.Random(SEED)
        self._num_started = 0
        self.present = [self._come() for _ in range(NUM_CUSTOMERS)]
        self.all = list(self.present)

    def _come(self) -> Child:
        self._num_started += 1
        words = ["-m", "tests.soak.customer", str(self._node.socket)]
        words.append(str(SEED + self._num_started))
        log_path = self._node.directory / f"customer.{self._num_started}.log"
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        child = Child([sys.executable, *words], log_path, environment)
        return self._stack.enter_context(child)

    def replace_one(self) -> None:
        """Kill one that is not the first, who stays to the end, and have another one come."""
        place = self._choose.randrange(1, NUM_CUSTOMERS)
        self.check()
        self.present[place].kill()
        self.present[place] = self._come()
        self.all.append(self.present[place])

    def check(self) -> None:
        for child in self.present:
            assert child.is_running, child.log

    def leave(self) -> None:
        for child in self.present:
            child.await_log("count")  # from then on it minds the signal
            child.send(signal.SIGTERM)
        for child in self.present:
            assert child.wait() == 0, child.log

    def counts(self) -> list[tuple[float, list[int]]]:
        """Return (when, blocks asked, came, calls away, calls) as they were told, by customer."""
        return [
            (float(line.split()[1]), [int(word) for word in line.split()[2:]])
            for child in self.all
            for line in ["count 0 0 0 0 0", *child.log.splitlines()]
            if re.fullmatch(r"count( [\d.]+){5}", line)
        ]

    def hit_rate(self, since_s: float, until_s: float) -> float:
        """Return the share of the blocks asked for between two times that came."""
        asked = came = 0
        for (_, before), (at_s, after) in _pairs(self.counts()):
            if since_s <= at_s < until_s:
                asked += after[0] - before[0]
                came += after[1] - before[1]
        assert asked > 1000, "enough to compare"
        return came / asked

    def num_calls(self) -> int:
        return sum(after[3] - before[3] for (_, before), (_, after) in _pairs(self.counts()))


Count = tuple[float, list[int]]


def _pairs(counts: Sequence[Count]) -> Iterator[tuple[Count, Count]]:
    """Yield what follows one another of one customer; each begins with zeros at time zero."""
    return ((a, b) for a, b in itertools.pairwise(counts) if b[0] > 0)


def look_at(daemon: Child) -> Look:
    status = psutil.Process(daemon.pid)
    return Look(time.monotonic(), daemon.memory_bytes()[0], status.num_fds(), status.num_threads())


class Story:
    """What happens to a node, told by the clock."""

    def __init__(self, node: RunningNode, server: RedisServer, stack: ExitStack) -> None:
        self.node = node
        self._server = server
        self._stack = stack
        self._pause = threading.Event()  # nobody sets it: a wait with a timeout
        self.redis = stack.enter_context(server.start())
        with server.client() as client:
            client.config_set("maxmemory", SERVER_MEMORY)
            client.config_set("maxmemory-policy", "allkeys-lru")
        self.daemon = stack.enter_context(node.daemon())
        self.logs = [self.daemon]
        self.crowd = Crowd(node, stack)
        self.looks: list[Look] = []

    def go_on(self, until_s: float, *, with_kills: bool) -> None:
        """Let time pass; kill a customer every third second."""
        killed_s = time.monotonic()
        while time.monotonic() < until_s:
            self._pause.wait(LOOK_S)
            self.crowd.check()
            self.looks.append(look_at(self.daemon))
            if with_kills and time.monotonic() - killed_s > 3:
                killed_s = time.monotonic()
                self.crowd.replace_one()

    def restart(self, *, in_order: bool) -> None:
        if in_order:
            assert self.daemon.stop() == 0
        else:
            self.daemon.kill()
        self.daemon = self._stack.enter_context(self.node.daemon())
        self.logs.append(self.daemon)

    def freeze_server(self, seconds: float) -> None:
        with self.redis.stopped():
            self.go_on(time.monotonic() + seconds, with_kills=False)

    def restart_server(self) -> None:
        self.redis.kill()
        self.node.await_state("remote", "out", timeout_s=20)
        self.redis = self._stack.enter_context(self._server.start())
        self.node.await_state("remote", "up", timeout_s=20)


def compare(story: Story, second: tuple[float, float], last: tuple[float, float]) -> None:
    def median(name: str, span: tuple[float, float]) -> float:
        looks = [getattr(look, name) for look in story.looks if span[0] <= look.at_s < span[1]]
        assert len(looks) > 10
        return statistics.median(looks)

    bounds = {
        "rss_bytes": RSS_GROWTH_MAX_BYTES,
        "num_files": FILES_GROWTH_MAX,
        "num_threads": THREADS_GROWTH_MAX,
    }
    for name, bound in bounds.items():
        before, after = median(name, second), median(name, last)
        print(f"{name}: {before:.0f} in the second fifth, {after:.0f} in the last")
        assert after - before <= bound, name
    rates = story.crowd.hit_rate(*second), story.crowd.hit_rate(*last)
    print(f"hit rate: {rates[0]:.3f} in the second fifth, {rates[1]:.3f} in the last")
    assert rates[1] >= rates[0] - HIT_RATE_LOSS_MAX


def is_at_rest(story: Story) -> None:
    """Nothing is held, all of it can be dropped, and the log tells only what was done to it."""
    node = story.node
    status = node.await_idle(20)
    assert (status["pins"], status["leases"]) == (0, 0)
    await_true(lambda: not node.stat()["engines"], "every session is over", 20)
    # The gauges are set once a second.
    await_true(lambda: node.metric("kvtier_pins") == 0, "a gauge says that nothing is pinned")
    assert status["transfers"]["ssd_to_cpu"]["bytes"] > 0
    assert status["transfers"]["remote_to_cpu"]["bytes"] > 0
    assert node.metric("kvtier_evicted_blocks_total", tier="ssd") > 0
    assert node.metric("kvtier_scrubbed_bytes_total") > 0
    assert node.metric("kvtier_background_faults_total") == 0
    for reason in ("checksum", "header", "identity", "length", "seal"):
        assert node.metric("kvtier_miss_blocks_total", reason=reason) == 0, reason
    assert sum(node.drop("cpu", "ssd").values()) > 0
    tiers = node.await_idle()["tiers"]
    assert [tiers[name]["blocks"] for name in ("cpu", "ssd")] == [0, 0]
    assert tiers["cpu"]["used_bytes"] == 0, "no slot is lost"
    assert story.daemon.stop() == 0
    unexpected = [
        line
        for daemon in story.logs
        for line in daemon.log.splitlines()
        if not EXPECTED.search(line)
    ]
    assert not unexpected, "\n".join(unexpected[:20])


@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(MINUTES * 60 + 240)
def test_an_hour_of_life() -> None:
    print(f"seed {SEED}, {MINUTES} minutes")
    fifth_s = MINUTES * 60 / 5
    with work_directory() as directory, ExitStack() as stack:
        server = RedisServer(directory)
        node = RunningNode(directory, SETTINGS | {"remote.url": server.url})
        story = Story(node, server, stack)
        start_s = time.monotonic()
        story.go_on(start_s + fifth_s / 3, with_kills=True)
        story.restart(in_order=True)
        story.go_on(start_s + 2 * fifth_s / 3, with_kills=True)
        story.restart(in_order=False)
        story.go_on(start_s + fifth_s, with_kills=True)
        story.go_on(start_s + 2 * fifth_s, with_kills=True)
        second = start_s + fifth_s, time.monotonic()
        story.freeze_server(fifth_s / 6)
        story.go_on(start_s + 3 * fifth_s, with_kills=True)
        story.restart_server()
        story.go_on(start_s + 4 * fifth_s, with_kills=True)
        last_s = time.monotonic()
        story.go_on(last_s + fifth_s, with_kills=True)
        last = last_s, time.monotonic()
        story.crowd.leave()
        print(f"{story.crowd.num_calls()} calls of {len(story.crowd.all)} customers")
        compare(story, second, last)
        is_at_rest(story)
