"""Links of a client: what one that comes to nothing leaves behind, and what an old one may void."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from kvtier.client.keeper import ChangeForwarder
from kvtier.client.link import open_link
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.core.residency_change import RESYNC, ResidencyChange
from kvtier.errors import DaemonUnavailable
from kvtier.tiers.host import HostArena
from kvtier.transfer.shm import ArenaServer, arena_socket
from kvtier.transfer.ticket_server import request_ticket
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from kvtier.wire.channel import quiet_channel

LAYOUT = KVLayout("test", 1, 16, 4096, "float32", "")
SPACE = KeySpace(bytes(32), "{}", LAYOUT, "float32", "test")
NO_NAME = "\ud800"
"""Which no message can carry."""


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_engine_that_cannot_register_leaves_nothing_behind(tmp_path: Path) -> None:
    socket_path, ended = tmp_path / "socket", list[str]()

    async def scenario() -> None:
        arena = HostArena(1, 65_536)
        arena_server = ArenaServer(arena, "boot", ended.append)
        await arena_server.start(arena_socket(socket_path))
        most = 0
        for num_tries in range(1, 5):
            with pytest.raises(ValueError, match="surrogates"):
                await asyncio.to_thread(open_link, socket_path, SPACE, NO_NAME)
            most = most or num_descriptors()  # gRPC has some of its own from the first one on
            async with asyncio.timeout(30):
                while len(ended) < num_tries or num_descriptors() > most:
                    await asyncio.sleep(0)
        await arena_server.stop()
        arena.close()

    asyncio.run(scenario())


def test_no_process_that_an_engine_starts_has_the_arena(tmp_path: Path) -> None:
    async def scenario() -> None:
        arena = HostArena(1, 65_536)
        arena_server = ArenaServer(arena, "boot", lambda _ticket: None)
        path = arena_socket(tmp_path / "socket")
        await arena_server.start(path)
        lifeline, _, (fd,) = await asyncio.to_thread(request_ticket, path, 10, 1)
        assert not os.get_inheritable(fd)
        os.close(fd)
        lifeline.close()
        await arena_server.stop()
        arena.close()

    asyncio.run(scenario())


def test_a_link_that_is_over_voids_nothing_of_the_next() -> None:
    heard: list[ResidencyChange] = []

    def hear(changes: Sequence[ResidencyChange]) -> None:
        heard.extend(changes)

    watching = ChangeForwarder(hear)
    watching.begin("old")
    watching.begin("new")
    watching.end("old")
    assert not heard
    watching.follow("new", [[RESYNC]])
    assert len(heard) == 1, "the new one is heard still"
    watching.end("new")
    watching.end("new")
    assert len(heard) == 2


def test_replies_that_cannot_be_parsed_leave_no_traceback_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon of another version may send such replies."""
    socket_path = tmp_path / "socket"
    server = grpc.server(ThreadPoolExecutor(2))
    replies = {
        "Register": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"\xff"),
        "Watch": grpc.unary_stream_rpc_method_handler(lambda _request, _context: iter([b"\xff"])),
    }
    handler = grpc.method_handlers_generic_handler("kvtier.v1.Engine", replies)
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"unix:{socket_path}")
    server.start()

    async def scenario() -> None:
        arena = HostArena(1, 65_536)
        arena_server = ArenaServer(arena, "boot", lambda _ticket: None)
        await arena_server.start(arena_socket(socket_path))
        with pytest.raises(DaemonUnavailable, match="INTERNAL"):
            await asyncio.to_thread(open_link, socket_path, SPACE, "test")
        await arena_server.stop()
        arena.close()

    asyncio.run(scenario())
    with grpc.insecure_channel(f"unix:{socket_path}") as channel:
        stub = engine_pb2_grpc.EngineStub(quiet_channel(channel))
        with pytest.raises(grpc.RpcError, match="INTERNAL"):
            list(stub.Watch(pb.WatchRequest(), timeout=10))
    server.stop(None)
    assert not caplog.records
