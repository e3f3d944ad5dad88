"""The URL of the remote tier in a file; test_rotation changes the login there."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kvtier.cli.main import main
from kvtier.testing.child import Child, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.certificates import write_secret
from tests.integration.pattern import PatternEngine
from tests.integration.redis_child import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.redis]

OLD = "geheim/@alt"


@dataclass
class Rig:
    """A server with a user, and a node that is told of both in a file."""

    server: RedisServer
    node: RunningNode
    path: Path

    def have_password(self, password: str) -> None:
        with self.server.client() as client:
            client.acl_setuser(
                "kv", enabled=True, reset_passwords=True, passwords=[f"+{password}"],
                keys=["*"], commands=["+@all"],
            )  # fmt: skip
            client.execute_command("CLIENT", "KILL", "USER", "kv")

    def write(self, password: str, port: int = 0) -> None:
        place = f"127.0.0.1:{port or self.server.port}/0"
        fresh = write_secret(self.path.with_suffix(".new"), f"redis://kv:{password}@{place}\n")
        fresh.replace(self.path)

    def store(self, prompt: int) -> None:
        self.node.await_state("remote", "up")
        with PatternEngine(self.node.socket) as engine:
            assert engine.store(prompt) == 4
            self.node.await_idle()
            self.node.drop("cpu")
            assert engine.load(prompt) == (["remote"] * 4, "complete")


@pytest.fixture
def rig() -> Iterator[Rig]:
    with work_directory() as directory:
        server, path = RedisServer(directory), directory / "url"
        node = RunningNode(directory, {"remote.url_file": str(path), "ssd.enabled": "false"})
        with server.start():
            yield Rig(server, node, path)


def reload(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["config", "reload", "--connect", str(node.socket)])
    said = capsys.readouterr()
    return code, said.out + said.err


def assert_untold(daemon: Child, *said: str) -> None:
    kept = [(Path(f"/proc/{daemon.pid}") / name).read_text() for name in ("environ", "cmdline")]
    for text in (daemon.log, *said, *kept):
        assert "geheim" not in text


def test_another_server_counts_once_the_tier_is_attached_anew(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    rig.have_password(OLD)
    rig.write(OLD)
    with work_directory() as directory, rig.node.daemon() as daemon:
        other = RedisServer(directory)
        with other.start():
            rig.write("x", other.port)
            code, said = reload(rig.node, capsys)
            assert code == 1
            assert "needs a restart, or `kvtier tier detach remote` first" in said
            rig.path.write_text("nonsense\n")
            code, refused = reload(rig.node, capsys)
            assert code == 1
            words = f"remote.url_file: {rig.path} does not contain the URL of a Redis server"
            assert words in refused
            rig.store(1)
            assert main(["config", "show", "--running", "--connect", str(rig.node.socket)]) == 0
            shown = capsys.readouterr().out
            assert f'# url = "redis://***@127.0.0.1:{rig.server.port}/0"' in shown
            rig.path.write_text(other.url)
            to = ["remote", "--connect", str(rig.node.socket)]
            assert main(["tier", "detach", *to]) == 0
            assert reload(rig.node, capsys)[0] == 0
            assert main(["tier", "attach", *to]) == 0
            rig.store(2)
            with redis.Redis(port=other.port, socket_timeout=60) as client:
                assert client.dbsize() == 4
        assert_untold(daemon, said, refused, shown)


def test_a_start_says_what_is_wrong_with_the_file(rig: Rig) -> None:
    rig.write(OLD)
    for content, mode, words in (
        ("nonsense", 0o600, "does not contain the URL of a Redis server"),
        ("redis://geheim@h", 0o600, f"in {rig.path}: a user without a password"),
    ):
        write_secret(rig.path, content, mode)
        with rig.node.start("serve") as daemon:
            assert daemon.wait(60) == 2
            assert "kvtier: remote.url_file: " in daemon.log
            assert words in daemon.log
            assert "geheim" not in daemon.log
