"""A crowd that connects to the HTTP server and asks nothing."""

import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from kvtier.api.http import server as server_module
from kvtier.api.http.server import HttpServer, serve

MOST = 8


class Slow:
    """An application with an answer that takes as long as the test wants."""

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Semaphore(0), threading.Event()
        self.app = Starlette(routes=[Route("/", self._answer), Route("/slow", self._answer_late)])

    async def _answer(self, _request: Request) -> Response:
        return PlainTextResponse("here")

    def _answer_late(self, _request: Request) -> Response:  # on a thread
        self.asked.release()
        assert self.may_answer.wait(30)
        return PlainTextResponse("at last")


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def server(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(server_module, "_CONNECTIONS_MAX", MOST)
    with serve(slow.app, "127.0.0.1", 0, grace_seconds=1) as server:
        yield server


def test_who_asks_nothing_makes_room_for_who_asks(slow: Slow, server: HttpServer) -> None:
    with (
        ExitStack() as crowd,
        ThreadPoolExecutor(1) as other,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        late = other.submit(httpx.get, f"{server.url}/slow", timeout=60)
        assert slow.asked.acquire(timeout=20)
        strangers = []
        for number in range(5 * MOST):
            stranger = socket.create_connection((server.host, server.port), timeout=20)
            strangers.append(crowd.enter_context(stranger))
            stranger.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n" if number % 2 else b"")
        assert client.get("/").text == "here", "a probe is answered"
        for stranger in strangers[: 4 * MOST]:
            assert is_cut(stranger)
        slow.may_answer.set()
        assert late.result(60).text == "at last", "one that is being answered stays"


def is_cut(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_where_all_are_being_answered_one_more_is_refused(slow: Slow, server: HttpServer) -> None:
    with ThreadPoolExecutor(MOST) as others:
        late = [others.submit(httpx.get, f"{server.url}/slow", timeout=60) for _ in range(MOST)]
        for _ in range(MOST):
            assert slow.asked.acquire(timeout=20)
        with socket.create_connection((server.host, server.port), timeout=20) as stranger:
            assert is_cut(stranger)
        slow.may_answer.set()
        assert {each.result(60).text for each in late} == {"at last"}
    assert httpx.get(server.url).text == "here", "and then there is room"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n", b"GET"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_head_of_a_request_has_a_deadline(
    slow: Slow, monkeypatch: pytest.MonkeyPatch, said: bytes, is_first: bool
) -> None:
    monkeypatch.setattr(server_module, "_HEAD_SECONDS", 0.2)
    with (
        serve(slow.app, "127.0.0.1", 0, grace_seconds=1) as server,
        socket.create_connection((server.host, server.port), timeout=20) as client,
    ):
        if not is_first:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            while not client.recv(1000).endswith(b"here"):
                pass
            said = said or b"G"  # an idle connection without a request has more time
        client.sendall(said)
        assert is_cut(client)


def test_a_request_that_is_being_answered_has_no_deadline(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_HEAD_SECONDS", 0.05)
    with serve(slow.app, "127.0.0.1", 0, grace_seconds=1) as server, ThreadPoolExecutor(1) as other:
        late = other.submit(httpx.get, f"{server.url}/slow", timeout=60)
        assert slow.asked.acquire(timeout=20)
        with socket.create_connection((server.host, server.port), timeout=20) as stranger:
            assert is_cut(stranger), "the deadline for the head has passed"
        slow.may_answer.set()
        assert late.result(60).text == "at last"


def test_a_client_that_does_not_read_the_response_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    async def much() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield bytes(1 << 20)
        is_over.set()  # output after a lost connection is discarded at once

    async def answer(_request: Request) -> Response:
        return StreamingResponse(much())

    monkeypatch.setattr(server_module, "_UNREAD_SECONDS", 1)
    app = Starlette(routes=[Route("/", answer)])
    with serve(app, "127.0.0.1", 0, grace_seconds=1) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert is_over.wait(30)
