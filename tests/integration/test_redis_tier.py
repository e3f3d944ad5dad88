"""A remote tier that hangs, seen by a client: loads end in time, and nothing stays held."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.client import ClientDeadlines
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.redis]

DEADLINES = ClientDeadlines(5, 2.0, 5, 0.1)


@pytest.fixture
def server() -> Iterator[tuple[RedisServer, Child]]:
    with work_directory() as directory:
        server = RedisServer(directory)
        with server.start() as child:
            yield server, child


@pytest.fixture
def node(server: tuple[RedisServer, Child]) -> Iterator[RunningNode]:
    settings = {"remote.url": server[0].url, "ssd.enabled": "false", "remote.deadline": "3s"}
    with work_directory() as directory:
        yield RunningNode(directory, settings)


def store_half_above(node: RunningNode, engine: PatternEngine) -> None:
    """Have eight blocks in the server, and the first four of them in the CPU tier too."""
    assert engine.store(1, 8) == 8
    node.await_idle()
    node.drop("cpu")
    assert engine.load(1, 4) == (["remote"] * 4, "complete")
    node.await_idle()


def test_a_load_that_is_late_gives_what_came(
    node: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with node.daemon(), PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        store_half_above(node, engine)
        with server[1].stopped():
            start_s = time.monotonic()
            assert engine.load(1, 8) == (["cpu"] * 4, "late")
            took_s = time.monotonic() - start_s
            print(f"ended after {took_s:.2f} s")
            assert 1.5 < took_s < DEADLINES.load_s + 2
            await_true(lambda: node.stat()["leases"] == 0, "its lease is gone")
            assert engine.load(1, 4) == (["cpu"] * 4, "complete"), "others go on"
            assert engine.store(2, 4) == 4
            assert engine.load(2, 4) == (["cpu"] * 4, "complete")
        status = node.await_idle()
        assert status["pins"] == 0
        assert status["miss_reasons"]["remote"]["late"] == 4
        await_true(lambda: engine.load(1, 8)[1] == "complete", "all of it comes again")


def test_a_client_killed_while_its_blocks_are_read(
    node: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with node.daemon(), PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        store_half_above(node, engine)
        source = (
            "import signal, sys; from pathlib import Path\n"
            f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            "from tests.integration.pattern import PatternEngine\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
            f"with PatternEngine(Path({str(node.socket)!r})) as engine:\n"
            "    print('attached', flush=True)\n"
            "    signal.sigwait({signal.SIGUSR1})\n"
            "    engine.load(1, 8)\n"
        )
        log_path = node.directory / "victim.log"
        with Child([sys.executable, "-c", source], log_path) as victim:
            victim.await_log("attached")
            with server[1].stopped():  # which is found out within seconds, and then nobody waits
                victim.send(signal.SIGUSR1)
                await_true(lambda: node.stat()["leases"] == 1, "it waits for its blocks")
                assert node.stat()["pins"] == 8
                victim.kill()
                await_true(lambda: node.stat()["leases"] == 0, "its lease is gone")
                assert node.stat()["pins"] == 0
        node.await_idle()
        await_true(lambda: engine.load(1, 8)[1] == "complete", "its blocks are whole")


def test_a_daemon_stops_although_a_server_hangs(
    node: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        store_half_above(node, engine)
        with server[1].stopped():
            engine.store(3, 8)
            start_s = time.monotonic()
            daemon.stop()
            print(f"stopped after {time.monotonic() - start_s:.2f} s")
            assert "Traceback" not in daemon.log
            assert daemon.wait() == 0


@pytest.mark.parametrize("how", ["restart", "flush"])
def test_a_server_that_lost_its_blocks_gets_them_again(
    node: RunningNode, server: tuple[RedisServer, Child], how: str
) -> None:
    redis_server, child = server
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        for prompt in range(1, 6):
            assert engine.store(prompt, 32) == 32
        node.await_blocks("remote", 160)
        node.drop("cpu")
        assert engine.load(1, 32) == (["remote"] * 32, "complete")
        with contextlib.ExitStack() as stack:
            if how == "restart":
                child.kill()
                stack.enter_context(redis_server.start())
                daemon.await_log('event="verified the blocks of a tier"')
            else:
                client = stack.enter_context(redis_server.client())
                client.flushall()
            # Blocks that the CPU tier still has are written again; no others count as held.
            node.await_blocks("remote", 32)
            client = stack.enter_context(redis_server.client())
            assert client.dbsize() == 32
            assert engine.store(2, 32) == 32, "lost blocks do not count as present"
            node.await_blocks("remote", 64)
            assert client.dbsize() == 64
            node.drop("cpu")
            assert engine.load(1, 32) == (["remote"] * 32, "complete")
            assert engine.load(2, 32) == (["remote"] * 32, "complete")
        assert "Traceback" not in daemon.log


def test_a_server_that_restarts_with_its_blocks_keeps_counting(
    node: RunningNode, server: tuple[RedisServer, Child]
) -> None:
    redis_server, child = server
    with node.daemon() as daemon, PatternEngine(node.socket, deadlines=DEADLINES) as engine:
        assert engine.store(1, 32) == 32
        node.await_blocks("remote", 32)
        with redis_server.client() as client:
            client.save()
        assert engine.store(2, 32) == 32
        node.await_blocks("remote", 64)
        node.drop("cpu")
        child.kill()
        with redis_server.start():
            node.await_blocks("remote", 32)
            daemon.await_log('event="verified the blocks of a tier"')
            assert node.metric("kvtier_evicted_blocks_total", tier="remote", reason="lost") == 32
            assert engine.load(1, 32) == (["remote"] * 32, "complete")
            assert engine.load(2, 32)[0] == []
