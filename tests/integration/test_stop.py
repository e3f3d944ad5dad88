"""SIGTERM: the process ends in order, with 0, within the grace, whatever hangs."""

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtier.testing.child import Child, await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, complete, url_of
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer
from tests.integration.traffic import Traffic
from tests.shim.storage import Call, StorageShim, block

pytestmark = pytest.mark.slow

GRACE_S = 3.0
LATE_S = 10.0
"""What a busy machine may take beyond it, until the parent sees the end."""

HANGING = {call: block() for call in Call}


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def served(directory: Path, **settings: str) -> RunningNode:
    more = {name.replace("__", "."): value for name, value in settings.items()}
    return RunningNode(directory, {"daemon.stop_grace": f"{GRACE_S:.0f}s", **more})


def await_hanging(shim: StorageShim) -> None:
    await_true(lambda: sum(map(shim.num_waiting, Call)), "a call hangs")


def stop(daemon: Child) -> float:
    """Tell a daemon to stop, and return how long it took."""
    start_s = time.monotonic()
    assert daemon.stop() == 0, daemon.log
    took_s = time.monotonic() - start_s
    print(f"ended after {took_s:.2f} s")
    assert took_s < GRACE_S + LATE_S
    assert "Traceback" not in daemon.log
    return took_s


def test_an_idle_daemon_ends_at_once(directory: Path) -> None:
    with served(directory, daemon__stop_grace="60s").daemon() as daemon:
        stop(daemon)
        assert "exited before the shutdown was complete" not in daemon.log


def test_under_load_calls_are_refused_and_what_was_written_is_there(directory: Path) -> None:
    node = served(directory)
    with node.daemon() as daemon, Traffic(node, seed=1):
        node.await_moved("cpu_to_ssd")
        stop(daemon)
    with node.daemon() as daemon, PatternEngine(node.socket):
        assert node.stat()["tiers"]["ssd"]["blocks"] > 0
        stop(daemon)


def test_with_a_disk_that_hangs(directory: Path) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = served(directory, ssd__deadline="1s")
        node.environment |= shim.environment
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_idle()
            with shim.suffering(HANGING):
                engine.store(2, 4)
                await_hanging(shim)
                stop(daemon)


def test_with_a_disk_that_begins_to_hang_as_it_stops(directory: Path) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = served(directory, ssd__deadline="60s")
        node.environment |= shim.environment
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_idle()
            with shim.suffering(HANGING):
                engine.store(2, 4)
                await_hanging(shim)
                stop(daemon)
                assert "did not close in time" in daemon.log


@pytest.mark.redis
def test_with_a_frozen_redis(directory: Path) -> None:
    server = RedisServer(directory)
    with server.start() as redis:
        node = served(directory, remote__url=server.url)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_blocks("remote", 4)
            with redis.stopped():
                engine.store(2, 4)
                stop(daemon)


def test_with_an_engine_that_stands_still(directory: Path, tiny_folder: Path) -> None:
    node = served(directory)
    with node.start("serve", "--model", str(tiny_folder)) as serve:
        complete(url_of(serve), [3 + number for number in range(64)])
        engines = await_true(lambda: node.stat()["engines"], "an engine is attached", 30)
        engine = psutil.Process(engines[0]["pid"])
        engine.suspend()
        stop(serve)
        assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
        assert "killed" in serve.log


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once_also_while_it_closes(
    directory: Path, first: signal.Signals
) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = served(directory, ssd__deadline="60s", daemon__stop_grace="60s")
        node.environment |= shim.environment
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_idle()
            with shim.suffering(HANGING):
                engine.store(2, 4)
                await_hanging(shim)
                daemon.send(first)
                daemon.await_log("event=stopping")
                start_s = time.monotonic()
                daemon.send(signal.SIGTERM)
                assert daemon.wait() == 0
                assert time.monotonic() - start_s < LATE_S
                assert "immediate stop" in daemon.log
                assert "hanging=" in daemon.log


@pytest.mark.parametrize("num_signals", [1, 2])
def test_with_a_log_that_nobody_reads(directory: Path, num_signals: int) -> None:
    node = served(directory, daemon__stop_grace="60s") if num_signals == 2 else served(directory)
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writing, b"." * 4096)
        command = kvtier_command("serve", *node.arguments())
        with subprocess.Popen(command, stderr=writing) as daemon:
            # It says what it found on the disk, to nobody.
            lock = directory / "ssd" / "lock"
            await_true(lambda: lock.exists() and b"pid" in lock.read_bytes(), "it opens", 30)
            start_s = time.monotonic()
            for _ in range(num_signals):
                daemon.send_signal(signal.SIGTERM)
                away_s = time.monotonic() + 0.5
                await_true(lambda until_s=away_s: time.monotonic() > until_s, "it was heard")
            assert daemon.wait(GRACE_S + LATE_S) == 0
            print(f"ended after {time.monotonic() - start_s:.2f} s")
    finally:
        os.close(reading)
        os.close(writing)


def test_while_it_starts_on_a_disk_that_hangs(directory: Path) -> None:
    with StorageShim(directory / "ssd", directory) as shim:
        node = served(directory)
        node.environment |= shim.environment
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            engine.store(1, 4)
            node.await_idle()
            assert daemon.stop() == 0
        with shim.suffering({Call.READ: block()}), node.start("serve") as daemon:
            await_true(lambda: shim.num_waiting(Call.READ), "the start waits for the disk", 30)
            took_s = stop(daemon)
            assert took_s > GRACE_S / 2, "the time is given to it"
            assert "starting" in daemon.log
