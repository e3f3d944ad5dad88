"""Health tells the truth: which tier is up, degraded or out, and why, within seconds."""

import errno
import re
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvtier.config import load_config
from kvtier.testing.child import await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, readiness
from kvtier.tiers.base import Health, Scrubbed, TierUsage
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.host import HostArena
from kvtier.tiers.memory import MemoryTier
from tests.integration.in_process import running
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer
from tests.shim.storage import Call, StorageShim, block, fail

pytestmark = pytest.mark.slow

NOTICED_S = 20.0
"""Within a few seconds both ways, also on a busy machine."""

TASKS = ("health", "scrub", "gauges", "reserve")


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def await_told(node: RunningNode, tier: str, state: str) -> str:
    """Wait until status, readiness and gauges agree; return the reason that was given."""
    reason = node.await_state(tier, state, timeout_s=NOTICED_S)
    await_true(lambda: readiness(node)[1]["tiers"][tier]["state"] == state, "readiness agrees")
    is_up = float(state != "out")
    await_true(lambda: node.metric("kvtier_tier_up", tier=tier) == is_up, "the gauge agrees")
    assert node.metric("kvtier_tier_state", tier=tier, state=state) == 1
    assert node.metric("kvtier_tier_state", tier=tier) == 1, "a tier is in one state"
    assert readiness(node)[0] == 200, "a tier that is out makes no daemon unready"
    return reason


def written_bytes(node: RunningNode) -> int:
    written: int = node.stat()["transfers"]["cpu_to_ssd"]["bytes"]
    return written


def shown(node: RunningNode) -> list[str]:
    command = kvtier_command("stat", "--socket", str(node.socket))
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert max(map(len, lines)) <= 80, lines
    return lines


@pytest.mark.redis
def test_a_frozen_server_is_out_and_back_by_itself(directory: Path) -> None:
    server = RedisServer(directory)
    with server.start() as redis:
        node = RunningNode(directory, {"remote.url": server.url})
        with node.daemon(), PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_blocks("remote", 4)
            with redis.stopped():
                assert await_told(node, "remote", "out"), "there is a reason"
                lines = shown(node)
                assert any(re.match(r"remote +out ", line) for line in lines)
                assert any(line.startswith("remote is out: ") for line in lines)
                assert engine.load(1, 4) == (["cpu"] * 4, "complete")
            assert await_told(node, "remote", "up") == ""
            engine.store(2, 4)
            node.await_blocks("remote", 8)


def test_a_disk_that_hangs_is_out_while_it_does(directory: Path) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = RunningNode(directory, {"ssd.deadline": "1s"}, shim.environment)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_idle()
            num_threads = psutil.Process(daemon.pid).num_threads()
            with shim.suffering({call: block() for call in Call}):
                engine.store(2, 4)
                assert re.match(r"no answer to a [\w ]+ for \d+ s", await_told(node, "ssd", "out"))
                hung = node.stat()["tiers"]["ssd"]["hung_calls"]
                for prompt in range(3, 20):
                    engine.store(prompt, 4)
                    assert engine.load(prompt, 4) == (["cpu"] * 4, "complete")
                assert 1 <= hung <= node.stat()["tiers"]["ssd"]["hung_calls"] <= 6
                assert psutil.Process(daemon.pid).num_threads() <= num_threads + 8
            assert await_told(node, "ssd", "up") == ""
            before = written_bytes(node)
            engine.store(99, 4)
            await_true(lambda: written_bytes(node) > before, "it is written again")
            assert node.stat()["tiers"]["ssd"]["hung_calls"] == 0


def test_a_disk_that_nobody_uses_is_out_too_and_does_not_flap(directory: Path) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = RunningNode(directory, {}, shim.environment)
        with node.daemon() as daemon:
            failing = {call: fail(errno.EIO) for call in (Call.WRITE, Call.OPEN_WRITE)}
            with shim.suffering(failing):
                assert await_told(node, "ssd", "out")
                tried = shim.num_faults(Call.WRITE) + shim.num_faults(Call.OPEN_WRITE)
                await_true(
                    lambda: (
                        shim.num_faults(Call.WRITE) + shim.num_faults(Call.OPEN_WRITE) > tried + 2
                    ),
                    "it is probed again and again",
                )
                assert daemon.log.count('event="tier is up"') == 0
            assert await_told(node, "ssd", "up") == ""
            assert daemon.log.count('event="tier is up"') == 1


def test_no_descriptors_left_is_got_over(directory: Path) -> None:
    node = RunningNode(directory)
    with node.daemon() as daemon, ExitStack() as strangers:
        node.await_state("cpu", "up")
        process = psutil.Process(daemon.pid)
        limit = process.num_fds() + 6
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(40):
            strangers.enter_context(socket.create_connection(("127.0.0.1", node.http_port)))
            for name in ("k.sock", "k.sock.arena"):
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
                stranger.connect(str(directory / name))
        daemon.await_log("out of system resource")
        before = process.cpu_times()
        began_s = time.monotonic()
        await_true(lambda: time.monotonic() - began_s > 2, "some time has passed")
        after = process.cpu_times()
        busy_s = after.user + after.system - before.user - before.system
        assert busy_s < 1, f"{busy_s} s of 2: it spins"
        assert len(daemon.log.splitlines()) < 60
        assert "Traceback" not in daemon.log
        strangers.close()
        with PatternEngine(node.socket) as engine:
            assert engine.store(1, 2) == 2
        assert readiness(node)[0] == 200
        assert daemon.stop() == 0


class Broken(MemoryTier):
    """A tier with a bug in everything that no request waits for."""

    is_logged = False

    def health(self) -> Health:
        raise RuntimeError("a bug in health")

    def usage(self) -> TierUsage:
        if threading.current_thread().name == "in-process":
            if self.is_logged:
                raise RuntimeError("a bug in usage")
            self.is_logged = True  # by the line that says that the tier is open
        return super().usage()

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        raise RuntimeError("a bug in scrub")


class MutedTier(BreakerTier):
    """Hides a bug in health from those that only want to know whether to ask."""

    num_health_calls = 0

    def health(self) -> Health:
        self.num_health_calls += 1
        if self.num_health_calls % 2:
            return super().health()
        return Health()


def test_no_exception_ends_what_works_in_the_background(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = RunningNode(directory)
    config = load_config(None, {key: str(value) for key, value in node.settings.items()}, {})
    monkeypatch.setattr("kvtier.daemon.daemon._RESERVE_PERIOD_S", 0.1)

    def num_faults(task: str) -> float:
        return node.metric("kvtier_background_faults_total", task=task)

    def no_memory(_arena: HostArena, slab: int) -> None:
        raise RuntimeError(f"a bug in reserve, slab {slab}")

    monkeypatch.setattr(HostArena, "reserve", no_memory)
    with running(config, lambda: MutedTier(Broken(1 << 20))):
        for task in TASKS:
            await_true(lambda task=task: num_faults(task) >= 2, f"{task} goes on after a bug", 20)
        assert readiness(node)[1]["ready"]
