"""The engine's Unix socket: who counts as an operator, and how its file is handled."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.app import create_app
from kvtier.api.http.chain import ChainIdentity
from kvtier.api.http.operator_socket import Operators, engine_socket
from kvtier.api.http.server import HttpServer, serve
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService

OWN_UID, OTHER_UID = os.geteuid(), 4711


@contextmanager
def serving(operators: Operators, port: int = 0) -> Iterator[tuple[HttpServer, Path]]:
    with FakeEngineService() as engine:
        app = create_app(
            engine,
            ByteChatModel(),
            registry=CollectorRegistry(),
            identity=ChainIdentity(bytes(16), 4),
        )
        with serve(app, "127.0.0.1", port, operators=operators) as server:
            yield server, engine_socket(operators.daemon_socket, server.port)


def ask_over(path: Path) -> httpx.Response:
    body = {"prompt": "x", "with_text": True}
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
        return client.post("http://localhost/v1/kvtier/chain", json=body)


@pytest.mark.parametrize(
    ("uid", "allowed", "mode", "status"),
    [
        (0, (), 0o600, 200),
        (OWN_UID, (), 0o600, 200),
        (OTHER_UID, (), 0o600, 403),
        (OTHER_UID, (OTHER_UID,), 0o666, 200),
        (OTHER_UID, (OTHER_UID + 1,), 0o666, 403),
    ],
)
def test_operators_are_those_of_the_daemon(tmp_path, uid, allowed, mode, status):
    operators = Operators(tmp_path / "k.sock", allowed, peer=lambda _connection: (1, uid))
    with serving(operators) as (_, path):
        assert path.stat().st_mode & 0o777 == mode
        assert ask_over(path).status_code == status
    assert not path.exists()


def test_what_a_killed_engine_left_behind_is_replaced(tmp_path):
    with serving(Operators(tmp_path / "k.sock")) as (server, path):
        pass
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serving(Operators(tmp_path / "k.sock"), server.port) as (_, path):
        assert ask_over(path).status_code == 200


def test_another_engines_socket_is_left_alone(tmp_path):
    with serving(Operators(tmp_path / "k.sock")) as (server, path):
        assert Operators(tmp_path / "k.sock").listen(server.port) is None
        assert ask_over(path).status_code == 200


def test_without_a_socket_the_engine_serves(tmp_path):
    with serving(Operators(tmp_path / "missing" / "k.sock")) as (server, path):
        assert not path.exists()
        reply = httpx.post(f"{server.url}/v1/kvtier/chain", json={"prompt": "x"})
        assert reply.status_code == 200
