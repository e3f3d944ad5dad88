"""The daemon's sockets: removed files, idle clients, and processes that leave a fork behind."""

import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtier.api.rpc.operator_client import operator_ticket_socket
from kvtier.core.limits import SESSIONS_MAX
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode, readiness
from kvtier.transfer.shm import arena_socket
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[RunningNode]:
    """A node whose sockets are in a separate directory."""
    with work_directory() as directory:
        yield RunningNode(directory, {"daemon.socket": str(directory / "run" / "k.sock")})


def files_of(node: RunningNode) -> list[Path]:
    return [node.socket, arena_socket(node.socket), operator_ticket_socket(node.socket)]


def is_ready(node: RunningNode) -> bool:
    return readiness(node)[0] == 200


def await_unready(node: RunningNode) -> str:
    """Wait until the daemon reports that no client can connect; returns the reason."""
    reason = await_true(
        lambda: readiness(node)[1].get("reason"), "the daemon reports that no client can connect"
    )
    assert not is_ready(node)
    assert await_true(lambda: node.metric("kvtier_ready") == 0, "the gauge agrees")
    return str(reason)


# Removed files


@pytest.mark.parametrize("what", ["main", "arena", "tools", "all", "directory"])
def test_a_socket_file_that_was_removed_is_created_again(node: RunningNode, what: str) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        session, files = engine.client.session, files_of(node)
        lost = (
            files
            if what in ("all", "directory")
            else [files[("main", "arena", "tools").index(what)]]
        )
        if what == "directory":
            for each in node.socket.parent.iterdir():
                each.unlink()
            node.socket.parent.rmdir()
        else:
            for each in lost:
                each.unlink()
        await_true(lambda: all(each.is_socket() for each in lost), "they are there again")
        for each in lost:
            daemon.await_log(rf"socket file was removed, created it again.*{each}\n")
        assert engine.store(1) == 4, "attached engines are not affected"
        with PatternEngine(node.socket) as late:
            assert late.load(1) == (["cpu"] * 4, "complete")
            assert len(node.stat()["engines"]) == 2
        assert engine.client.session == session
        assert is_ready(node)
        assert daemon.stop() == 0
        assert not [each for each in files if each.exists()]


def test_a_socket_of_another_process_is_left_alone_and_reported(node: RunningNode) -> None:
    with node.daemon() as daemon, socket.socket(socket.AF_UNIX) as other:
        fresh = node.socket.with_name("other")
        other.bind(str(fresh))
        other.listen(1)
        fresh.replace(node.socket)
        inode = node.socket.stat().st_ino
        assert f"{node.socket} is in use by another process" in await_unready(node)
        other.close()
        await_true(lambda: is_ready(node), "it has the path again")
        assert node.socket.stat().st_ino != inode
        daemon.await_log("clients can connect again")
        assert daemon.log.count('event="no client can connect"') == 1
        assert not node.stat()["engines"]


def test_a_socket_that_cannot_be_created_is_reported(node: RunningNode) -> None:
    directory = node.socket.parent
    with node.daemon() as daemon:
        aside = directory.with_name("aside")
        directory.rename(aside)
        directory.write_text("not a directory")
        assert str(directory) in await_unready(node)
        directory.unlink()
        await_true(lambda: is_ready(node), "it is created")
        daemon.await_log("clients can connect again")
        assert node.stat()["version"]


# Another daemon at the same path


def test_a_daemon_that_stops_removes_no_socket_of_another(node: RunningNode) -> None:
    with work_directory() as directory, ExitStack() as daemons:
        first = daemons.enter_context(node.daemon())
        other = RunningNode(directory, {"daemon.socket": str(node.socket)})
        with first.stopped():  # so that it cannot create its files again first
            for each in node.socket.parent.iterdir():
                each.unlink()
            second = daemons.enter_context(other.daemon())
        assert f"held by pid {second.pid}" in await_unready(node)
        inodes = [each.stat().st_ino for each in files_of(node)]
        assert first.stop() == 0
        assert [each.stat().st_ino for each in files_of(node)] == inodes
        with PatternEngine(node.socket) as engine:
            assert engine.store(1) == 4
            assert other.stat()["pid"] == second.pid


def test_a_daemon_whose_rival_has_ended_serves_again(node: RunningNode) -> None:
    with work_directory() as directory, ExitStack() as daemons:
        first = daemons.enter_context(node.daemon())
        other = RunningNode(directory, {"daemon.socket": str(node.socket)})
        with first.stopped():
            for each in node.socket.parent.iterdir():
                each.unlink()
            second = daemons.enter_context(other.daemon())
        await_unready(node)
        second.kill()  # its files are left behind
        await_true(lambda: is_ready(node), "the first one has the path again")
        assert node.stat()["pid"] == first.pid


def test_a_daemon_does_not_start_on_the_sockets_of_a_living_one(node: RunningNode) -> None:
    with work_directory() as directory, node.daemon() as first:
        other = RunningNode(directory, {"daemon.socket": str(node.socket)})
        with first.stopped():
            node.socket.with_name("k.sock.lock").unlink()
            with other.start("serve") as second:
                assert second.wait() != 0
                assert "is in use by another process" in second.log
        assert node.stat()["pid"] == first.pid


# Idle clients


def test_idle_clients_keep_nobody_out(node: RunningNode) -> None:
    with node.daemon() as daemon, ExitStack() as crowd:
        for path in (arena_socket(node.socket), operator_ticket_socket(node.socket)):
            for _ in range(2 * SESSIONS_MAX):
                idle = crowd.enter_context(socket.socket(socket.AF_UNIX))
                idle.settimeout(20)
                idle.connect(str(path))
        engine = crowd.enter_context(PatternEngine(node.socket))
        assert engine.store(1) == 4
        assert len(node.stat()["engines"]) == 1
        assert 'event="idle client disconnected"' in daemon.log
        assert daemon.log.count("idle client disconnected") < 10


# Processes that leave a fork behind

_ORPHAN = """
import os, signal, sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
from kvtier.errors import DaemonUnavailable
from tests.integration.pattern import PatternEngine, num_arenas

path = Path({socket!r})

def say(*words):
    print(*words, flush=True)

{code}
"""

_LEAVES_A_FORK = """
with PatternEngine(path) as engine:
    engine.store(1)
    held = engine.client.hold(engine.tenant, engine.chain(1, 4), 0)
    child = os.fork()
    if child:
        say("left", child, "holding", len(held.tiers))
    signal.pause()
"""

_USES_ITS_FORK = """
with PatternEngine(path) as engine:
    engine.store(1)
    blocks = engine.client.load(engine.tenant, engine.chain(1, 4), 0)
    first = next(blocks)
    child = os.fork()
    if child == 0:
        try:
            assert not engine.client.is_attached
            for call in (lambda: engine.lookup(1), lambda: engine.store(2)):
                try:
                    call()
                except DaemonUnavailable as error:
                    say("refused:", error)
            engine.client.announce([], ["none"])
            engine.client.close()
            with PatternEngine(path) as own:
                assert own.client.session
                assert own.load(1) == (["cpu"] * 4, "complete")
                say("own session")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert len([first, *blocks]) == 5
    assert engine.store(3) == 4
    say("parent serves")
"""

_CRASHES = """
from kvtier.client.link import open_link
from tests.integration.pattern import key_space

for number in range({times}):
    engine = os.fork()
    if engine == 0:
        link = open_link(path, key_space(), f"engine {{number}}")
        orphan = os.fork()
        if orphan:
            say("orphan", orphan)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    os.waitpid(engine, 0)
say("done")
signal.pause()
"""


@contextmanager
def client_process(node: RunningNode, code: str) -> Iterator[Child]:
    root = str(Path(__file__).parents[2])
    source = _ORPHAN.format(root=root, socket=str(node.socket), code=code)
    with Child([sys.executable, "-c", source], node.directory / "client.log") as child:
        yield child


@contextmanager
def ended(pids: Sequence[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)


def test_the_session_of_a_killed_engine_ends_although_its_fork_lives(node: RunningNode) -> None:
    with node.daemon(daemon__lease="10min"), client_process(node, _LEAVES_A_FORK) as engine:
        orphan = engine.await_log(r"left (\d+) holding 4")[1]
        with ended([orphan]):
            assert [each["pid"] for each in node.stat()["engines"]] == [engine.pid]
            assert node.stat()["pins"] == 4
            engine.kill()
            await_true(lambda: not node.stat()["engines"], "no dead process is named")
            status = node.stat()
            assert status["leases"] == status["pins"] == 0, "its leases have ended with it"
            os.kill(int(orphan), 0)


def test_forks_of_dead_engines_use_up_no_sessions(node: RunningNode) -> None:
    times = SESSIONS_MAX + 1
    with node.daemon(), client_process(node, _CRASHES.format(times=times)) as crasher:
        crasher.await_log("done")
        orphans = [line.split()[1] for line in crasher.log.splitlines() if "orphan" in line]
        with ended(orphans), PatternEngine(node.socket) as engine:
            assert len(orphans) == times
            assert engine.store(1) == 4
            own = [os.getpid()]
            await_true(lambda: [e["pid"] for e in node.stat()["engines"]] == own, "it is alone")


def test_a_client_in_a_fork_is_refused_and_a_new_one_has_its_own_session(node: RunningNode) -> None:
    with node.daemon(), client_process(node, _USES_ITS_FORK) as engine:
        assert engine.wait() == 0
        assert (
            engine.log.count("refused: the client was started before this process was forked") == 2
        )
        assert "own session" in engine.log
        assert "parent serves" in engine.log
