"""Who may attach and operate: real daemons, and clients that are other users of this machine."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvtier.api.rpc.operator_client import operator_ticket_socket
from kvtier.testing.child import kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.transfer.shm import arena_socket
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc
from tests.integration.certificates import Authority, write_secret
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

FRIEND, STRANGER = 65_532, 65_533
TOKEN = "token-of-these-tests-0123456789"

AS_USER = """
import os, sys
sys.path.insert(0, {root!r})
import kvtier.cli.main, kvtier.cli.commands, kvtier.cli.stat
import kvtier.connectors.integrated, kvtier.client, tests.integration.pattern
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
{code}
"""
"""Imports first: this interpreter may lie where the other user cannot read."""

OPERATE = "sys.exit(kvtier.cli.main.main({arguments!r}))"

ATTACH = """
from pathlib import Path
from tests.integration.pattern import PatternEngine
with PatternEngine(Path({socket!r})) as engine:
    assert engine.store(1) == 4
    assert engine.load(1) == 4 or True
    print("stored")
"""

CONNECT = """
import kvtier.client.link as link
from pathlib import Path
from tests.integration.pattern import key_space
try:
    link.open_link(Path({socket!r}), key_space(), "stranger")
except Exception as error:
    sys.exit(str(error))
"""


def run_as(uid: int, code: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    source = AS_USER.format(root=root, uid=uid, code=code)
    return subprocess.run(
        [sys.executable, "-c", source], check=False, capture_output=True, text=True, timeout=60
    )


def operate(uid: int, node: RunningNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [*arguments, "--connect", str(node.socket)]
    return run_as(uid, OPERATE.format(arguments=words))


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory, {"ssd.enabled": "false"})


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@as_root
def test_only_the_daemons_user_unless_told_otherwise(node: RunningNode) -> None:
    node.directory.chmod(0o711)
    with node.daemon() as daemon:
        for path in (node.socket, arena_socket(node.socket), operator_ticket_socket(node.socket)):
            assert mode_of(path) & 0o077 == 0, path
        told = operate(FRIEND, node, "stat")
        assert (told.returncode, told.stdout) == (2, "")
        assert f"user {FRIEND} may not connect" in told.stderr
        assert "daemon.allowed_uids" in told.stderr
        assert told.stderr.count("\n") == 1
        told = run_as(FRIEND, CONNECT.format(socket=str(node.socket)))
        assert "may not connect" in told.stderr
        assert daemon.stop() == 0


@as_root
def test_named_users_attach_and_operate_and_others_do_not(node: RunningNode) -> None:
    node.directory.chmod(0o711)
    with node.daemon(daemon__allowed_uids=f"1000,{FRIEND}") as daemon:
        for path in (node.socket, arena_socket(node.socket), operator_ticket_socket(node.socket)):
            assert mode_of(path) == 0o666, path
        attached = run_as(FRIEND, ATTACH.format(socket=str(node.socket)))
        assert (attached.returncode, attached.stdout) == (0, "stored\n"), attached.stderr
        told = operate(FRIEND, node, "stat", "--json")
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["pid"] == daemon.pid
        for told in (
            operate(STRANGER, node, "stat"),
            operate(STRANGER, node, "drop", "--tier", "all"),
            run_as(STRANGER, CONNECT.format(socket=str(node.socket))),
        ):
            assert told.returncode != 0
            assert not told.stdout
            assert f"user {STRANGER} may not attach or operate" in told.stderr
            assert "daemon.allowed_uids" in told.stderr
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4, "nothing was dropped"
        daemon.await_log(f'event="user refused" uid={STRANGER}')
        assert daemon.stop() == 0


@as_root
def test_a_stranger_who_finds_the_socket_gets_no_answer(node: RunningNode) -> None:
    node.directory.chmod(0o711)
    code = (
        "import grpc\n"
        "from kvtier.v1 import operator_pb2 as pb, operator_pb2_grpc\n"
        f"channel = grpc.insecure_channel('unix:{node.socket}')\n"
        "try:\n"
        "    operator_pb2_grpc.OperatorStub(channel).Stat(pb.StatRequest(), timeout=10)\n"
        "except grpc.RpcError as error:\n"
        "    print(error.code().name, error.details())\n"
    )
    with node.daemon(daemon__allowed_uids=FRIEND) as daemon:
        told = run_as(STRANGER, code)
        assert told.stdout.startswith("PERMISSION_DENIED"), told.stdout + told.stderr
        assert str(operator_ticket_socket(node.socket)) in told.stdout
        assert daemon.stop() == 0


def test_sessions_cannot_be_guessed(node: RunningNode) -> None:
    with node.daemon() as daemon:
        with PatternEngine(node.socket) as engine:
            session = engine.client.session
            boot = node.stat()["boot"]
            assert boot not in session
            assert len(session) == 32
            shown = json.dumps(node.stat())
            assert session not in shown
            assert session not in daemon.log
        with grpc.insecure_channel(f"unix:{node.socket}") as channel:
            stub = operator_pb2_grpc.OperatorStub(channel)
            with pytest.raises(grpc.RpcError) as caught:
                stub.Ping(pb.PingRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert daemon.stop() == 0


def test_a_directory_that_nobody_passes_is_refused_at_the_start(node: RunningNode) -> None:
    node.directory.chmod(0o700)
    with node.start("serve", daemon__allowed_uids=FRIEND) as daemon:
        assert daemon.wait() == 2
        assert daemon.log.count("\n") == 1
        assert daemon.log.startswith("kvtier: daemon.allowed_uids: other users have no access to")
        assert f"chmod 711 {node.directory}" in daemon.log


def test_a_directory_of_the_daemons_own_is_made_passable(node: RunningNode) -> None:
    node.directory.chmod(0o711)
    node.socket = node.directory / "run" / "k.sock"
    node.settings["daemon.socket"] = str(node.socket)
    umask = os.umask(0o077)
    try:
        with node.daemon(daemon__allowed_uids=FRIEND) as daemon:
            assert mode_of(node.socket.parent) == 0o711
            assert daemon.stop() == 0
    finally:
        os.umask(umask)


# TCP


def settings_of(directory: Path) -> dict[str, str]:
    pair = Authority(directory).pair("daemon")
    return {
        "rpc.listen": "127.0.0.1:0",
        "rpc.tls_cert": str(pair.certificate),
        "rpc.tls_key": str(pair.key),
        "rpc.token_file": str(write_secret(directory / "token", TOKEN)),
    }


def remotely(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        kvtier_command(*arguments), check=False, capture_output=True, text=True, timeout=30
    )


def test_an_operator_elsewhere(node: RunningNode) -> None:
    node.settings |= settings_of(node.directory)
    ca, token = node.directory / "ours-ca.pem", node.directory / "token"
    with node.daemon() as daemon:
        port = daemon.await_log(r"rpc_port=(\d+)")[1]
        where = ["--connect", f"localhost:{port}"]
        secrets = ["--ca", str(ca), "--token-file", str(token)]
        told = remotely("stat", "--json", *where, *secrets)
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)["pid"] == daemon.pid
        told = remotely("drop", "--tier", "all", *where, *secrets)
        assert told.returncode == 0, told.stderr
        wrong = write_secret(node.directory / "wrong", TOKEN[::-1])
        refusals = {
            "TCP connections need a token": ["stat", *where, "--ca", str(ca)],
            "--token-file: ": ["stat", *where, "--token-file", str(node.directory / "none")],
            "--ca: the certificate of localhost": ["stat", *where, "--token-file", str(token)],
            "--ca: ": ["stat", *where, "--token-file", str(token), "--ca", "/none"],
            "rejected the token": [
                *("drop", "--tier", "all", *where),
                *("--ca", str(ca), "--token-file", str(wrong)),
            ],
            "cannot reach the daemon": ["stat", "--connect", "localhost:1", *secrets],
            "only valid for TCP": ["stat", "--connect", str(node.socket), *secrets],
        }
        for said, words in refusals.items():
            told = remotely(*words)
            assert (told.returncode, told.stdout) == (2, ""), said
            assert said in told.stderr
            assert told.stderr.count("\n") == 1, told.stderr
            assert TOKEN not in told.stderr
        assert TOKEN not in daemon.log
        assert daemon.stop() == 0


@pytest.mark.parametrize("name", ["rpc.tls_cert", "rpc.tls_key", "rpc.token_file"])
def test_a_bad_file_is_refused_before_anything_is_taken(node: RunningNode, name: str) -> None:
    node.settings |= settings_of(node.directory)
    node.settings[name] = str(write_secret(node.directory / "bad", "nothing"))
    with node.start("serve") as daemon:
        assert daemon.wait() == 2
        assert daemon.log.startswith(f"kvtier: {name}: ")
        assert daemon.log.count("\n") == 1
    assert not node.socket.exists()


# Keys


def test_a_daemon_without_keys_survives_the_signal(node: RunningNode) -> None:
    with node.daemon() as daemon:
        daemon.send(signal.SIGHUP)
        assert node.stat()["pid"] == daemon.pid
        assert daemon.stop() == 0
