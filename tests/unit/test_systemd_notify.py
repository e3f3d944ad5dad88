"""What systemd is told, over a real socket: nothing that is not so, and nothing that stops us."""

import asyncio
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.config import load_config
from kvtier.core.residency import TierName
from kvtier.daemon.daemon import Daemon
from kvtier.daemon.serving.systemd import Systemd
from kvtier.daemon.status.health import NodeHealth
from kvtier.daemon.stop import Stop
from kvtier.tiers.base import Health
from kvtier.tiers.host import HostArena
from tests.unit.test_liveness import SLAB_BYTES, driver_of


class Listener:
    """The end that systemd has."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(30)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def next(self) -> dict[str, str]:
        """Wait for a datagram; returns its facts."""
        lines = self._socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def is_empty(self) -> bool:
        readable, _, _ = select.select([self._socket], [], [], 0)
        return not readable

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    path = str(tmp_path / "notify")
    listener = Listener(path if request.param == "path" else f"@kvtier-{os.getpid()}")
    yield listener
    listener.close()


def test_what_is_told_from_start_to_stop(systemd: Listener) -> None:
    environment = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "3000000", "HOME": "/"}
    ours = Systemd.from_environment(environment)
    assert environment == {"HOME": "/"}, "children have no say"
    assert ours.period_s == 1.0
    ours.starting("opening\nthe tiers")
    assert systemd.next() == {"STATUS": "opening the tiers"}
    with ours.reloading():
        assert systemd.is_empty, "what starts is not ready because it read its keys"
    assert systemd.is_empty
    ours.ready()
    assert systemd.next() == {"READY": "1", "STATUS": "serving"}
    with ours.reloading():
        told = systemd.next()
        assert told["RELOADING"] == "1"
        assert int(told["MONOTONIC_USEC"]) > 0
        assert systemd.is_empty
    assert systemd.next() == {"READY": "1"}
    ours.stopping(20)
    told = systemd.next()
    assert (told["STOPPING"], told["EXTEND_TIMEOUT_USEC"]) == ("1", "25000000")


@pytest.mark.parametrize(
    ("environment", "period_s"),
    [
        ({}, 5.0),
        ({"WATCHDOG_USEC": "30000000"}, 5.0),
        ({"WATCHDOG_USEC": "600000", "WATCHDOG_PID": str(os.getpid())}, 0.2),
        ({"WATCHDOG_USEC": "600000", "WATCHDOG_PID": "1"}, 5.0),
        ({"WATCHDOG_USEC": "soon"}, 5.0),
        ({"WATCHDOG_USEC": "0"}, 5.0),
    ],
)
def test_how_often_the_watchdog_is_fed(environment: dict[str, str], period_s: float) -> None:
    ours = Systemd.from_environment(environment)
    assert ours.period_s == pytest.approx(period_s)
    ours.close()


@pytest.mark.parametrize("address", ["", "/nowhere/notify", "vsock:2:1234", "@" + "x" * 200])
def test_nobody_who_listens_is_no_fault(address: str) -> None:
    ours = Systemd.from_environment({"NOTIFY_SOCKET": address})
    ours.starting("opening the tiers")
    ours.ready()
    with ours.reloading():
        pass
    ours.stopping(1)


def test_the_watchdog_is_fed_while_the_daemon_is_well(
    systemd: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        arena = HostArena(1, SLAB_BYTES)
        driver = driver_of(arena)
        lane = driver.node.transfers.lanes[TierName.SSD]
        now_s = [100.0]
        health = NodeHealth(driver, Health, lambda _name: None, clock_s=lambda: now_s[0])
        ours = Systemd(systemd.address, 3.0)

        async def told() -> dict[str, str]:
            await ours.report(health)
            return systemd.next()

        health.refresh()
        await ours.report(health)
        assert systemd.is_empty, "it does not serve yet"
        ours.ready()
        assert systemd.next()["READY"] == "1"
        assert await told() == {"STATUS": "serving: cpu up", "WATCHDOG": "1"}
        now_s[0] += 60
        assert await told() == {"STATUS": "the event loop has been stuck for 60 s"}
        health.refresh()
        assert "WATCHDOG" in await told()
        monkeypatch.setattr("kvtier.daemon.status.health._STALL_MAX_S", 0.0)
        lane.reads.add(7, 1, 4096, 0)
        health.refresh()
        assert list(await told()) == ["STATUS"], "work of a tier stands still"
        lane.reads.clear()
        health.refresh()
        assert "WATCHDOG" in await told()
        ours.close()
        driver.stop()
        arena.close()

    asyncio.run(scenario())


def test_a_stop_is_told_when_it_begins(systemd: Listener) -> None:
    stop = Stop(10, end=lambda _code: None)
    Daemon(load_config(None, {}, {}), stop=stop, systemd=Systemd(systemd.address))
    stop.request(signal.SIGTERM)
    told = systemd.next()
    assert told["STOPPING"] == "1"
    assert 13e6 < int(told["EXTEND_TIMEOUT_USEC"]) <= 15e6


def test_what_nobody_took_is_told_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        arena = HostArena(1, SLAB_BYTES)
        driver = driver_of(arena)
        health = NodeHealth(driver, Health, lambda _name: None)
        ours = Systemd(str(tmp_path / "notify"))
        ours.ready()
        late = Listener(str(tmp_path / "notify"))
        await ours.report(health)
        assert late.next()["READY"] == "1"
        await ours.report(health)
        assert "READY" not in late.next()
        late.close()
        ours.close()
        driver.stop()
        arena.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_listener_that_takes_nothing_is_waited_for_a_moment(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "notify"))
    ours = Systemd(listener.address)
    telling = threading.Thread(target=lambda: [ours.starting("x" * 500) for _ in range(30)])
    telling.start()
    telling.join(30)
    assert not telling.is_alive()
    ours.close()
    listener.close()
