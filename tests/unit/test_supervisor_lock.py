"""The engine's lock, which says who holds it, where that is not true any more."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.daemon.stop import Stop
from kvtier.daemon.supervisor import Supervisor, engine_lock
from kvtier.errors import StartError
from kvtier.lock import acquire_lock
from kvtier.testing.child import await_true

LEFT_BEHIND = """
import os, signal, sys
from pathlib import Path
from kvtier.lock import acquire_lock

lock = acquire_lock(Path(sys.argv[1]), "daemon.socket", "the engine")
if os.fork():
    os._exit(0)
if len(sys.argv) > 2:
    os.pwrite(lock, f"pid {sys.argv[2]} on host ".encode(), 0)
print(os.getpid(), flush=True)
signal.pause()
"""
"""A process of an engine that outlives it, and with it holds its lock."""


@contextmanager
def left_behind(lock: Path, *named: str) -> Iterator[None]:
    command = [sys.executable, "-c", LEFT_BEHIND, str(lock), *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.wait(30)
        try:
            yield
        finally:
            signal.pidfd_send_signal(pidfd := os.pidfd_open(pid), signal.SIGKILL)
            os.close(pidfd)


def is_held(lock: Path) -> bool:
    try:
        acquire_lock(lock, "daemon.socket", "it")
    except StartError:
        return True
    return False


@pytest.mark.parametrize("is_reused", [False, True], ids=["gone", "another's"])
def test_a_daemon_neither_spins_nor_ends_who_has_the_engines_number_now(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_reused: bool
) -> None:
    socket_path = tmp_path / "socket"

    async def scenario(other: subprocess.Popen[bytes]) -> None:
        stopping = asyncio.Event()
        stop = Stop(60, end=lambda _code: None)
        running = asyncio.create_task(Supervisor(socket_path, (), stop).run(stopping))
        async with asyncio.timeout(30):
            while "the engine's lock is held" not in caplog.text:
                await asyncio.sleep(0)
            stopping.set()
            assert await running == 0
        assert other.poll() is None, "it is no engine of ours"

    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        named = (str(other.pid),) if is_reused else ()
        try:
            with left_behind(engine_lock(socket_path), *named):
                asyncio.run(scenario(other))
        finally:
            other.kill()
    await_true(lambda: not is_held(engine_lock(socket_path)), "it goes with what held it")
