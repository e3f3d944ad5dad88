"""The gRPC servers alone: which calls come through, over the Unix socket and over TCP."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier.api.rpc.credentials import Credentials
from kvtier.api.rpc.operator_client import (
    RemoteDaemon,
    local_operator,
    operator_ticket_socket,
    remote_operator,
)
from kvtier.api.rpc.server import open_tcp, open_unix
from kvtier.config import ListenAddress, RpcConfig
from kvtier.errors import DaemonUnavailable, StartError
from kvtier.secret import read_tokens
from kvtier.testing.child import await_true, work_directory
from kvtier.transfer.ticket_server import TicketServer, request_ticket
from kvtier.v1 import engine_pb2, engine_pb2_grpc, operator_pb2, operator_pb2_grpc
from kvtier.v1 import operator_pb2 as pb
from tests.integration.certificates import Authority, Pair, write_secret

pytestmark = pytest.mark.slow

TOKEN = "token-of-these-tests-0123456789"
STRANGER = (4711, 65_533)


class Operator(operator_pb2_grpc.OperatorServicer):
    """Answers one call; all others are not there."""

    async def Ping(self, request: pb.PingRequest, context: Any) -> pb.PingReply:
        return pb.PingReply(version="here")


@contextmanager
def on_a_loop(start: Callable[[], Awaitable[Callable[[], Awaitable[object]]]]) -> Iterator[None]:
    """Run servers on a loop of their own; ``start`` returns what stops them."""
    loop = asyncio.new_event_loop()
    running = threading.Thread(target=loop.run_forever)
    running.start()
    stop = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        running.join(20)
        loop.close()


@contextmanager
def unix_server(**server_options: Any) -> Iterator[Path]:
    with work_directory() as directory:
        path = directory / "k.sock"

        async def start() -> Callable[[], Awaitable[object]]:
            ticket_server = TicketServer((), 2, **server_options)
            await ticket_server.start(operator_ticket_socket(path))
            server = await open_unix(
                path, ticket_server, (), engine_pb2_grpc.EngineServicer(), Operator()
            )

            async def stop() -> None:
                await server.stop(0)
                await ticket_server.stop()

            return stop

        with on_a_loop(start):
            yield path


def code_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def ping(stub: operator_pb2_grpc.OperatorStub, **more: Any) -> str:
    version: str = stub.Ping(pb.PingRequest(), timeout=10, **more).version
    return version


def test_a_ticket_opens_every_call_of_an_operator() -> None:
    with unix_server() as path, local_operator(path, 5) as stub:
        assert ping(stub) == "here"
        # Let through, to a service that does not have it.
        code, _ = code_of(lambda: stub.Stat(pb.StatRequest(), timeout=10))
        assert code is grpc.StatusCode.UNIMPLEMENTED


def refuses(stub: operator_pb2_grpc.OperatorStub, **more: Any) -> bool:
    try:
        ping(stub, **more)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.PERMISSION_DENIED
    return False


def test_without_a_ticket_no_call_comes_through() -> None:
    with unix_server() as path, grpc.insecure_channel(f"unix:{path}") as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        calls: dict[str, Callable[[], object]] = {
            "ping": lambda: ping(stub),
            "stat": lambda: stub.Stat(pb.StatRequest(), timeout=10),
            "drop": lambda: stub.Drop(pb.DropRequest(), timeout=10),
            "fsck": lambda: list(stub.Fsck(pb.FsckRequest(), timeout=10)),
        }
        for shown in ("", "x", "Bearer", "Bearer ", "Bearer 0", f"Basic {'0' * 32}"):
            metadata = (("authorization", shown),)
            calls[shown] = lambda metadata=metadata: ping(stub, metadata=metadata)
        for name, call in calls.items():
            code, said = code_of(call)
            assert code is grpc.StatusCode.PERMISSION_DENIED, name
            assert str(operator_ticket_socket(path)) in said


def test_a_ticket_ends_with_its_holder() -> None:
    with unix_server() as path:
        lifeline, message, _ = request_ticket(operator_ticket_socket(path), 5)
        shown = (("authorization", f"Bearer {message['ticket']}"),)
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = operator_pb2_grpc.OperatorStub(channel)
            assert ping(stub, metadata=shown) == "here"
            lifeline.close()
            await_true(lambda: refuses(stub, metadata=shown), "the daemon's loop has seen it")


def test_a_stranger_gets_no_ticket() -> None:
    turned_away = pytest.raises(DaemonUnavailable, match="user 65533")
    with unix_server(identify=lambda _: STRANGER) as path, turned_away, local_operator(path, 5):
        pass


def test_an_engine_shows_its_session_instead() -> None:
    """The guard leaves its calls to the service, which asks for the ticket and the proof."""
    with unix_server() as path, grpc.insecure_channel(f"unix:{path}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        code, _ = code_of(lambda: stub.Lookup(engine_pb2.LookupRequest(), timeout=10))
        assert code is grpc.StatusCode.UNIMPLEMENTED


# Messages that cannot be parsed

METHODS = [
    (f"/{service.full_name}/{method.name}", method.server_streaming)
    for module, name in ((engine_pb2, "Engine"), (operator_pb2, "Operator"))
    for service in [module.DESCRIPTOR.services_by_name[name]]
    for method in service.methods
]
NO_MESSAGE = b"\xff"
"""A message that ends in the middle of a number."""


def call_raw(
    channel: grpc.Channel, method: str, *, streaming: bool, message: bytes = NO_MESSAGE, **more: Any
) -> tuple[grpc.StatusCode, str]:
    """Send raw bytes as a request; returns the error with which the call ended."""
    if streaming:
        return code_of(lambda: list(channel.unary_stream(method)(message, timeout=10, **more)))
    return code_of(lambda: channel.unary_unary(method)(message, timeout=10, **more))


def test_every_method_refuses_what_it_cannot_parse(caplog: pytest.LogCaptureFixture) -> None:
    with unix_server() as path, grpc.insecure_channel(f"unix:{path}") as channel:
        lifeline, message, _ = request_ticket(operator_ticket_socket(path), 5)
        shown = (("authorization", f"Bearer {message['ticket']}"),)
        for method, streaming in METHODS:
            code, said = call_raw(channel, method, streaming=streaming, metadata=shown)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, method
            assert method in said
        lifeline.close()
    assert len(METHODS) > 20
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("WARNING", "cannot parse a request")
    ], "one warning for all of them, without a traceback"


@pytest.mark.parametrize(
    ("method", "message", "code"),
    [
        ("/kvtier.v1.Engine/None", b"", grpc.StatusCode.UNIMPLEMENTED),
        ("/nothing", NO_MESSAGE, grpc.StatusCode.PERMISSION_DENIED),
        ("/kvtier.v1.Operator/Stat", NO_MESSAGE, grpc.StatusCode.PERMISSION_DENIED),
        ("/kvtier.v1.Engine/Lookup", bytes(5 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_call_that_makes_no_sense_is_not_an_error_of_the_daemon(
    caplog: pytest.LogCaptureFixture, method: str, message: bytes, code: grpc.StatusCode
) -> None:
    with unix_server() as path, grpc.insecure_channel(f"unix:{path}") as channel:
        assert call_raw(channel, method, streaming=False, message=message)[0] is code
    assert not caplog.records


# TCP


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with work_directory() as path:
        yield path


@pytest.fixture(scope="module")
def authority(directory: Path) -> Authority:
    return Authority(directory)


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.pair("daemon")


@pytest.fixture(scope="module")
def config(directory: Path, pair: Pair) -> RpcConfig:
    token = write_secret(directory / "token", TOKEN + "\n")
    return RpcConfig(
        listen=ListenAddress("127.0.0.1", 0),
        tls_cert=pair.certificate,
        tls_key=pair.key,
        token_file=token,
    )


@pytest.fixture(scope="module")
def address(config: RpcConfig) -> Iterator[str]:
    ports = []

    async def start() -> Callable[[], Awaitable[object]]:
        assert config.listen is not None
        server, port = await open_tcp(config.listen, Credentials(config), Operator())
        ports.append(port)
        return lambda: server.stop(0)

    with on_a_loop(start):
        yield f"127.0.0.1:{ports[0]}"


def test_with_the_token_over_tls(address: str, authority: Authority) -> None:
    ca = authority.path.read_bytes()
    for where in (address, address.replace("127.0.0.1", "localhost")):
        with remote_operator(RemoteDaemon(where, TOKEN, ca)) as stub:
            assert ping(stub) == "here"


@pytest.mark.parametrize("token", ["x" * 16, TOKEN[:-1], TOKEN + "0", TOKEN.upper()])
def test_with_another_token(address: str, authority: Authority, token: str) -> None:
    with remote_operator(RemoteDaemon(address, token, authority.path.read_bytes())) as stub:
        code, said = code_of(lambda: ping(stub))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "--token-file" in said
    assert TOKEN not in said


def test_without_a_token(address: str, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        assert code_of(lambda: ping(stub))[0] is grpc.StatusCode.PERMISSION_DENIED


def test_engines_do_not_come_over_tcp(address: str, authority: Authority) -> None:
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    with grpc.secure_channel(address, credentials) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        code, _ = code_of(lambda: stub.Lookup(engine_pb2.LookupRequest(), timeout=10))
        assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_caller_without_the_token_is_refused_before_its_message_is_read(
    address: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """They can neither fill the log nor use up concurrent calls by never sending a message."""
    ca, may_send = authority.path.read_bytes(), threading.Event()

    def requests() -> Iterator[bytes]:
        may_send.wait(60)
        yield from ()

    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)) as channel:
        for _ in range(20):
            call = channel.stream_unary("/kvtier.v1.Operator/Ping")
            code, _ = code_of(lambda call=call: call(requests(), timeout=10))
            assert code is grpc.StatusCode.PERMISSION_DENIED
        for method, streaming in METHODS:
            code, _ = call_raw(channel, method, streaming=streaming)
            assert code is not grpc.StatusCode.INVALID_ARGUMENT, method
        with remote_operator(RemoteDaemon(address, TOKEN, ca)) as stub:
            assert ping(stub) == "here"
        may_send.set()
    assert not caplog.records


def test_a_caller_with_the_token_is_told_that_a_message_cannot_be_parsed(
    address: str, authority: Authority
) -> None:
    credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
    shown = (("authorization", f"Bearer {TOKEN}"),)
    with grpc.secure_channel(address, credentials) as channel:
        for method, streaming in METHODS:
            if "Operator" in method:
                code, _ = call_raw(channel, method, streaming=streaming, metadata=shown)
                assert code is grpc.StatusCode.INVALID_ARGUMENT, method


def test_a_silent_connection_is_closed(address: str) -> None:
    """The limit is 10 s; that of gRPC itself would be two minutes."""
    host, _, port = address.rpartition(":")
    client_hello = bytes.fromhex(
        "1603010200010001fc0303"
    )  # announces 500 more bytes, which never come
    with unix_server() as path, ExitStack() as stack:
        local = stack.enter_context(socket.socket(socket.AF_UNIX))
        local.connect(str(path))
        remote = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in "ab"]
        remote[1].sendall(client_hello)
        for client in (local, *remote):
            client.settimeout(30)
            try:
                while client.recv(1000):
                    pass
            except ConnectionResetError:
                pass


def test_without_tls_nothing_is_said(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = operator_pb2_grpc.OperatorStub(channel)
        code, _ = code_of(lambda: ping(stub))
        assert code is grpc.StatusCode.UNAVAILABLE


def test_a_client_trusts_only_its_own_authority(address: str, directory: Path) -> None:
    other = Authority(directory, "other")
    with remote_operator(RemoteDaemon(address, TOKEN, other.path.read_bytes())) as stub:
        assert code_of(lambda: ping(stub))[0] is grpc.StatusCode.UNAVAILABLE


def test_an_address_in_use_is_refused(address: str, config: RpcConfig) -> None:
    async def again() -> None:
        await open_tcp(
            ListenAddress("127.0.0.1", int(address.rpartition(":")[2])),
            Credentials(config),
            Operator(),
        )

    with pytest.raises(StartError, match=r"rpc\.listen"):
        asyncio.run(again())


# Files


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "token_file"])
@pytest.mark.parametrize("content", [None, b"", b"\0\1\2nothing", b"-----BEGIN CERTIFICATE-----"])
def test_a_file_that_will_not_do_is_named(
    directory: Path, config: RpcConfig, name: str, content: bytes | None
) -> None:
    path = directory / "wrong"
    path.unlink(missing_ok=True)
    if content is not None:
        write_secret(path, content)
    with pytest.raises(StartError) as refused:
        Credentials(config.model_copy(update={name: path}))
    assert refused.value.field == f"rpc.{name}"
    assert refused.value.remedy


def test_a_key_of_another_certificate(authority: Authority, config: RpcConfig) -> None:
    other = authority.pair("another")
    with pytest.raises(StartError, match="not the key of the first certificate") as refused:
        Credentials(config.model_copy(update={"tls_key": other.key}))
    assert refused.value.field == "rpc.tls_key"


@pytest.mark.parametrize("name", ["tls_key", "token_file"])
def test_a_secret_that_others_read(directory: Path, config: RpcConfig, name: str) -> None:
    content = getattr(config, name).read_bytes()
    path = write_secret(directory / "open", content, mode=0o644)
    with pytest.raises(StartError, match="chmod 600") as refused:
        Credentials(config.model_copy(update={name: path}))
    assert refused.value.field == f"rpc.{name}"


@pytest.mark.parametrize(
    "text", ["short", "x" * 15, "a b c d e f g h i", f"{TOKEN}\n" * 9, "", "ö" * 16, "\t" * 20]
)
def test_a_token_that_is_none(directory: Path, text: str) -> None:
    path = write_secret(directory / "token-wrong", text)
    with pytest.raises(StartError, match=str(path)) as refused:
        read_tokens(path, "rpc.token_file")
    assert TOKEN not in str(refused.value)


def test_secrets_show_nowhere(config: RpcConfig) -> None:
    shown = repr(Credentials(config)) + repr(RemoteDaemon("here:1", TOKEN))
    assert TOKEN not in shown
    assert "PRIVATE" not in shown
