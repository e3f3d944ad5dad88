"""The ticket server: who is admitted, with what, for how long. On real sockets in one process."""

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import await_true, work_directory
from kvtier.transfer.ticket_server import (
    Peer,
    TicketServer,
    Welcome,
    peer_of,
    pidfd_of,
    request_ticket,
)

SELF = (os.getpid(), os.geteuid())
STRANGER = (4711, 65_533)


def with_server(
    test: Callable[[TicketServer, Path], Awaitable[None]],
    make: Callable[[], TicketServer] | None = None,
) -> None:
    async def run() -> None:
        with work_directory() as directory:
            ticket_server = make() if make else TicketServer((), 2)
            await ticket_server.start(directory / "k.sock.tickets")
            try:
                async with asyncio.timeout(20):
                    await test(ticket_server, directory / "k.sock.tickets")
            finally:
                await ticket_server.stop()

    asyncio.run(run())


async def enter(path: Path, num_fds: int = 0) -> tuple[socket.socket, dict[str, str | int]]:
    lifeline, message, fds = await asyncio.to_thread(request_ticket, path, 5, num_fds)
    for fd in fds:
        os.close(fd)
    return lifeline, message


async def until(look: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(await_true, look, what)


def test_a_ticket_is_good_while_its_lifeline_holds() -> None:
    ended: list[Peer] = []

    async def test(ticket_server: TicketServer, path: Path) -> None:
        lifeline, message = await enter(path)
        ticket = str(message["ticket"])
        peer = ticket_server.peer(ticket)
        assert peer is not None
        assert (peer.pid, peer.uid) == SELF
        assert len(ticket) == 32
        lifeline.close()
        await until(lambda: ticket_server.peer(ticket) is None, "the ticket is worth nothing")
        assert ended == [peer]

    with_server(test, partial(TicketServer, (), 2, on_end=ended.append))


def test_tickets_are_never_alike_and_no_other_is_good() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        seen = set()
        for _ in range(20):
            lifeline, message = await enter(path)
            ticket = str(message["ticket"])
            seen.add(ticket)
            lifeline.close()
            await until(partial(has_left, ticket_server, ticket), "it has left")
        assert len(seen) == 20
        for other in ("", "0" * 32, ticket.upper(), ticket[:-1]):
            assert ticket_server.peer(other) is None

    with_server(test)


def has_left(ticket_server: TicketServer, ticket: str) -> bool:
    return ticket_server.peer(ticket) is None


def test_files_come_with_the_ticket() -> None:
    async def test(_ticket_server: TicketServer, path: Path) -> None:
        lifeline, message, (fd,) = await asyncio.to_thread(request_ticket, path, 5, 1)
        assert message["size"] == 7
        assert os.fstat(fd).st_ino == os.stat("/dev/null").st_ino
        os.close(fd)
        lifeline.close()

    with open("/dev/null", "rb") as null:
        welcome = Welcome({"size": 7}, (null.fileno(),))
        with_server(test, partial(TicketServer, (), 2, welcome=lambda _peer: welcome))


def test_a_door_that_passes_no_file_is_not_the_one_wanted() -> None:
    async def test(_ticket_server: TicketServer, path: Path) -> None:
        with pytest.raises(DaemonUnavailable, match="no daemon of this version"):
            await enter(path, num_fds=1)

    with_server(test)


def test_a_full_house_says_so_and_has_room_again() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        first, message = await enter(path)
        second, other = await enter(path)
        for each in (message, other):
            assert ticket_server.keep(str(each["ticket"]))
        with pytest.raises(DaemonUnavailable, match="no room"):
            await enter(path)
        first.close()

        async def comes_in() -> bool:
            try:
                third, _ = await enter(path)
            except DaemonUnavailable:
                return False
            third.close()
            return True

        while not await comes_in():
            await asyncio.sleep(0)
        second.close()

    with_server(test)


def test_an_unregistered_client_makes_room_for_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        registered, message = await enter(path)
        assert ticket_server.keep(str(message["ticket"]))
        idle = [await enter(path) for _ in range(5)]
        assert [ticket_server.peer(str(told["ticket"])) is not None for _, told in idle] == [
            False
        ] * 4 + [True], "the newest one got the place"
        assert ticket_server.peer(str(message["ticket"])) is not None
        for lifeline in (registered, *(each for each, _ in idle)):
            lifeline.close()

    with caplog.at_level(logging.WARNING, "kvtier.transfer"):
        with_server(test)
    assert [record.message for record in caplog.records] == ["idle client disconnected"]


def test_a_client_turned_away_for_lack_of_room_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        lifeline, message = await enter(path)
        assert ticket_server.keep(str(message["ticket"]))
        for _ in range(3):
            with pytest.raises(DaemonUnavailable, match="no room"):
                await enter(path)
        lifeline.close()

    with caplog.at_level(logging.WARNING, "kvtier.transfer"):
        with_server(test, partial(TicketServer, (), 1))
    assert [record.message for record in caplog.records] == ["no room for another client"]


def test_a_client_that_does_not_register_in_time_is_disconnected() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        idle, _ = await enter(path)
        assert await asyncio.to_thread(idle.recv, 1) == b""
        idle.close()

    with_server(test, partial(TicketServer, (), 2, patience_s=0.05))


def test_a_registered_client_stays_as_long_as_requested() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        engine, message = await enter(path)
        tool, other = await enter(path)
        assert ticket_server.keep(str(message["ticket"]))
        assert ticket_server.keep(str(other["ticket"]), 0.05)
        assert await asyncio.to_thread(tool.recv, 1) == b"", "it has been disconnected"
        assert not ticket_server.keep(str(other["ticket"]))
        assert ticket_server.peer(str(message["ticket"])) is not None
        for lifeline in (engine, tool):
            lifeline.close()

    with_server(test, partial(TicketServer, (), 2, patience_s=60))


def forked(child: Callable[[], object]) -> int:
    """Run ``child`` in a forked process that then waits until it is killed; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            kept = child()
            while kept is not None:
                signal.pause()
        finally:
            os._exit(1)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # it is a child of another process
        os.waitpid(pid, 0)


def test_a_ticket_ends_with_its_process_although_a_fork_of_it_lives() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        told, tell = os.pipe()

        def enter_and_fork() -> object:
            lifeline, message, _ = request_ticket(path, 5)
            orphan = forked(lambda: lifeline)
            os.write(tell, f"{message['ticket']} {orphan}".encode())
            return lifeline

        client = forked(enter_and_fork)
        ticket, orphan = (await asyncio.to_thread(os.read, told, 100)).decode().split()
        is_known = ticket_server.keep(ticket)
        kill(client)
        try:
            assert is_known
            await until(partial(has_left, ticket_server, ticket), "the session is over")
            os.kill(int(orphan), 0)
        finally:
            kill(int(orphan))
            os.close(told)
            os.close(tell)

    with_server(test)


@pytest.mark.parametrize("option", [77, 32_000])
def test_a_process_is_watched_with_or_without_so_peerpidfd(option: int) -> None:
    """No kernel knows option 32,000, just as kernels before Linux 6.5 do not know 77."""
    with work_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "s"))
        listener.listen(1)

        def connect() -> object:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(directory / "s"))
            return connection

        client = forked(connect)
        connection, _ = listener.accept()
        with connection:
            pidfd = pidfd_of(connection, client, option)
            assert pidfd is not None
            assert not select.select([pidfd], [], [], 0)[0]
            kill(client)
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
            with pytest.raises(ProcessLookupError):
                pidfd_of(connection, client, 32_000)


def test_a_process_that_cannot_be_seen_is_watched_by_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert pidfd_of(ours, 0, 32_000) is None, "it is in another PID namespace"

        def forbidden(_pid: int) -> int:
            raise PermissionError(errno.EPERM, "by a seccomp filter")

        monkeypatch.setattr(os, "pidfd_open", forbidden)
        assert pidfd_of(ours, os.getpid(), 32_000) is None


def test_one_who_speaks_is_let_go() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        lifeline, message = await enter(path)
        lifeline.send(b"hello")
        await until(partial(has_left, ticket_server, str(message["ticket"])), "it was let go")
        lifeline.close()

    with_server(test)


@pytest.mark.parametrize("allowed", [(), (1000,), (1000, 65_532)])
def test_a_stranger_is_turned_away_and_told_what_to_do(allowed: tuple[int, ...]) -> None:
    async def test(_ticket_server: TicketServer, path: Path) -> None:
        with pytest.raises(DaemonUnavailable, match=r"user 65533.*daemon\.allowed_uids"):
            await enter(path)

    with_server(test, partial(TicketServer, allowed, 2, identify=lambda _connection: STRANGER))


@pytest.mark.parametrize("uid", [0, os.geteuid(), STRANGER[1]])
def test_root_the_own_user_and_those_named_are_let_in(uid: int) -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        lifeline, message = await enter(path)
        peer = ticket_server.peer(str(message["ticket"]))
        assert peer is not None
        assert peer.uid == uid
        lifeline.close()

    with_server(
        test, partial(TicketServer, (STRANGER[1],), 2, identify=lambda _connection: (1, uid))
    )


def test_strangers_take_no_place() -> None:
    async def test(_ticket_server: TicketServer, path: Path) -> None:
        for _ in range(10):
            with pytest.raises(DaemonUnavailable, match="may not attach"):
                await enter(path)
        turn.append(SELF)
        lifeline, _ = await enter(path)
        lifeline.close()

    turn = [STRANGER]
    with_server(test, partial(TicketServer, (), 1, identify=lambda _connection: turn[-1]))


def test_the_socket_is_as_open_as_it_has_to_be() -> None:
    for allowed, mode in (((), 0o600), ((1000,), 0o666)):

        async def test(_ticket_server: TicketServer, path: Path, mode: int = mode) -> None:
            assert stat.S_IMODE(path.stat().st_mode) == mode

        with_server(test, partial(TicketServer, allowed, 2))


def test_what_a_dead_daemon_left_is_replaced() -> None:
    async def run() -> None:
        with work_directory() as directory:
            path = directory / "k.sock.tickets"
            with socket.socket(socket.AF_UNIX) as old:
                old.bind(str(path))
            with pytest.raises(DaemonUnavailable, match="no daemon answers"):
                await enter(path)
            ticket_server = TicketServer((), 2)
            await ticket_server.start(path)
            lifeline, _ = await enter(path)
            lifeline.close()
            await ticket_server.stop()
            with pytest.raises(DaemonUnavailable):
                await enter(path)

    asyncio.run(run())


def test_a_door_that_does_not_move_is_left_in_time() -> None:
    with work_directory() as directory, socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(directory / "k.sock.tickets"))
        silent.listen(1)
        with pytest.raises(DaemonUnavailable, match="gave no answer"):
            request_ticket(directory / "k.sock.tickets", 0.05)


@pytest.mark.parametrize("said", [b"", b"hello", b"\xff\xfe", b"[]", b"{}", b'"ticket"', b"5"])
def test_what_is_no_daemon_is_none(said: bytes) -> None:
    with work_directory() as directory, socket.socket(socket.AF_UNIX) as other:
        other.bind(str(directory / "k.sock.tickets"))
        other.listen(1)

        async def run() -> None:
            requesting = asyncio.create_task(enter(directory / "k.sock.tickets"))
            connection = await asyncio.to_thread(lambda: other.accept()[0])
            connection.send(said)
            connection.close()
            with pytest.raises(DaemonUnavailable):
                await requesting

        asyncio.run(run())


def test_the_kernel_says_who_is_there() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_of(ours) == SELF


def test_one_who_cannot_be_let_in_keeps_out_nobody_else() -> None:
    bugs = [RuntimeError("a bug")]

    def welcome(_peer: Peer) -> Welcome:
        if bugs:
            raise bugs.pop()
        return Welcome({})

    async def test(ticket_server: TicketServer, path: Path) -> None:
        with pytest.raises(DaemonUnavailable):
            await enter(path)
        lifelines = [(await enter(path))[0] for _ in range(2)]
        assert len(lifelines) == 2, "his place is free again"
        for lifeline in lifelines:
            lifeline.close()

    with_server(test, partial(TicketServer, (), 2, welcome=welcome))


def test_one_whom_the_kernel_does_not_know_keeps_out_nobody_else() -> None:
    peers = iter([OSError("gone"), SELF])

    def peer(_connection: socket.socket) -> tuple[int, int]:
        found = next(peers)
        if isinstance(found, OSError):
            raise found
        return found

    async def test(_ticket_server: TicketServer, path: Path) -> None:
        with pytest.raises(DaemonUnavailable):
            await enter(path)
        lifeline, _ = await enter(path)
        lifeline.close()

    with_server(test, partial(TicketServer, (), 2, identify=peer))


def test_a_door_whose_file_was_removed_reopens_and_keeps_its_visitors() -> None:
    async def test(ticket_server: TicketServer, path: Path) -> None:
        lifeline, message = await enter(path)
        path.unlink()
        assert not ticket_server.is_in_place
        await ticket_server.reopen()
        assert ticket_server.is_in_place
        assert ticket_server.peer(str(message["ticket"])) is not None
        second, _ = await enter(path)
        for each in (lifeline, second):
            each.close()

    with_server(test)


def test_a_door_removes_no_file_of_another_one() -> None:
    async def run() -> None:
        with work_directory() as directory:
            path = directory / "k.sock.tickets"
            first, second = TicketServer((), 2), TicketServer((), 2)
            await first.start(path)
            path.unlink()
            await second.start(path)
            await first.stop()
            lifeline, _ = await enter(path)
            lifeline.close()
            await second.stop()
            assert not path.exists()

    asyncio.run(run())
