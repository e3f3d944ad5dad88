"""A daemon whose loop stands still starves the watchdog, whatever its other threads do."""

import asyncio
import select
import socket
import threading
from functools import partial

import pytest

from kvtier.config import load_config
from kvtier.daemon.daemon import Daemon
from kvtier.daemon.serving.systemd import Systemd
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, fetch

pytestmark = pytest.mark.slow

WATCHDOG_S = 1.5


class HeldDaemon:
    """A daemon on a thread, whose loop is held from when it is ready until ``release``."""

    def __init__(self, node: RunningNode, address: str) -> None:
        self.held, self.release, self.done = (threading.Event() for _ in range(3))
        self._node = node
        self._address = address
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "HeldDaemon":
        self._thread.start()
        assert self.held.wait(30), "it is ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self.done.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        settings = {key: str(value) for key, value in self._node.settings.items()}
        systemd = Systemd(self._address, WATCHDOG_S)
        async with Daemon(load_config(None, settings, {}), systemd=systemd).serving():
            self.held.set()
            self.release.wait(30)
            await asyncio.to_thread(self.done.wait, 30)


def test_a_loop_that_stands_still_feeds_nothing_and_goes_on_afterwards() -> None:
    with work_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        address = str(directory / "notify")
        ear.bind(address)
        told: list[str] = []

        def is_fed(within_s: float) -> bool:
            while select.select([ear], [], [], within_s)[0]:
                told.append(ear.recv(4096).decode())
                if "WATCHDOG=1" in told[-1]:
                    return True
            return False

        node = RunningNode(directory)
        silent_s = partial(node.metric, "kvtier_loop_silent_seconds")
        with HeldDaemon(node, address) as daemon:
            while is_fed(0.0):
                continue
            assert any("READY=1" in each for each in told), told
            assert fetch(f"http://127.0.0.1:{node.http_port}/metrics"), "other threads go on"
            assert not is_fed(WATCHDOG_S)
            assert silent_s() > WATCHDOG_S, "it is told meanwhile"
            daemon.release.set()
            await_true(lambda: is_fed(WATCHDOG_S), "it is fed again")
            await_true(lambda: silent_s() < WATCHDOG_S, "it is heard again")
        while is_fed(0.0):
            continue
        assert "STOPPING=1" in told[-1]
