"""``kvtier doctor`` as an operator runs it: what is wrong is found, named, and told how to mend."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.child import kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.shim.storage import Call, StorageShim, block

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def run(
    *words: str, before: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*before, *kvtier_command("doctor", *words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"COLUMNS": "80"} | dict(environment or {}),
    )


def findings(*words: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code and each check's finding."""
    done = run(*words, "--json", **more)
    assert not done.stderr, done.stderr
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert all(check["found"] for check in checks.values())
    for check in checks.values():
        assert bool(check["remedy"]) == (check["verdict"] != "ok"), check
    return done.returncode, checks


def settings(node: RunningNode, **changes: str) -> list[str]:
    return node.arguments(**{"ssd__capacity": "8MiB", **changes})


def test_nothing_is_wrong_and_nothing_is_changed(directory: Path) -> None:
    node = RunningNode(directory)
    before = sorted(directory.rglob("*"))
    done = run(*settings(node), "--measure")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert max(map(len, lines)) <= 80
    assert lines[-1].endswith(" 0 fail")
    assert any(line.startswith("ok    speed       writes ") for line in lines), lines
    assert sorted(directory.rglob("*")) == before, "not even the folders that a start makes"


def test_beside_a_running_daemon(directory: Path) -> None:
    node = RunningNode(directory)
    with node.daemon() as daemon:
        code, found = findings(*settings(node))
        assert code == 0
        assert f"pid {daemon.pid}" in found["daemon"]["found"]
        assert "used by the running daemon" in found["ports"]["found"]
        assert "the running daemon's" in found["nofile"]["found"]
        with daemon.stopped():
            code, found = findings(*settings(node))
            assert code == 1
            assert "did not answer in time" in found["daemon"]["found"]
        daemon.kill()
    code, found = findings(*settings(node))
    assert code == 0, "the socket of a daemon that was killed is no fault"
    assert found["daemon"]["found"].startswith("not running")


def test_each_fault_is_found_beside_the_others(directory: Path) -> None:
    (directory / "keys").write_text("2026 00\n")
    (directory / "keys").chmod(0o644)
    (directory / "socket").write_text("no socket")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        code, found = findings(
            *settings(
                RunningNode(directory),
                cpu__capacity="900TiB",
                ssd__directory="/dev/shm/kvtier-doctor",
                ssd__capacity="900TiB",
                ssd__free_inodes_floor="1000000000000",
                http__listen=f"127.0.0.1:{port}",
                seal__key_file=str(directory / "keys"),
                daemon__socket=str(directory / "socket"),
                remote__url="redis://user:geheim@127.0.0.1:1/0",
            ),
            before=("prlimit", "--nofile=128:128"),
        )
    assert code == 1
    failed = {name for name, check in found.items() if check["verdict"] == "fail"}
    wanted = "memory space inodes mount nofile ports files socket remote"
    assert failed >= set(wanted.split()), found
    assert not Path("/dev/shm/kvtier-doctor").exists()
    assert "geheim" not in json.dumps(found)


def test_a_configuration_that_is_none_is_said_first(directory: Path) -> None:
    (directory / "kvtier.toml").write_text("[cpu]\ncapacty = '1GiB'\n")
    code, found = findings("--config", str(directory / "kvtier.toml"))
    assert code == 1
    assert next(iter(found)) == "config"
    assert found["config"]["remedy"] == "did you mean capacity?"
    assert found["kernel"]["verdict"] == "ok", "all else is looked at"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_disk_that_may_not_be_written(directory: Path) -> None:
    ssd = directory / "ssd"
    ssd.mkdir(mode=0o755)
    ssd.chmod(0o755)
    node = RunningNode(directory)
    assert findings(*settings(node))[1]["ssd"]["remedy"] == f"chmod 700 {ssd}"
    sealed = f"mount --bind {ssd} {ssd} && mount -o remount,bind,ro {ssd}"
    code, found = findings(
        *settings(node), before=("unshare", "--mount", "sh", "-c", f'{sealed} && exec "$@"', "sh")
    )
    assert code == 1
    assert found["ssd"]["verdict"] == found["direct-io"]["verdict"] == "fail"
    assert "read-only file system" in found["direct-io"]["found"]


def test_a_disk_that_hangs_keeps_nobody(directory: Path) -> None:
    ssd = directory / "ssd"
    ssd.mkdir(mode=0o700)
    with (
        StorageShim(ssd, directory) as shim,
        shim.suffering({call: block() for call in Call}),
    ):
        code, found = findings(*settings(RunningNode(directory)), environment=shim.environment)
        assert code == 1
        assert found["direct-io"]["found"] == "no answer within 3 s"
        assert found["memory"]["verdict"] == "ok"


AS_ANOTHER = """
import os, sys
import kvtier.cli.doctor
from kvtier.cli.main import main
os.setgroups([])
os.setresgid(2000, 2000, 2000)
os.setresuid(2000, 2000, 2000)
sys.exit(main(sys.argv[4:]))
"""
"""Imports first: this interpreter may lie where the other user cannot read."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("may_ask", [True, False])
def test_another_user_sees_whose_the_ports_are(directory: Path, may_ask: bool) -> None:
    node = RunningNode(directory, {"daemon.allowed_uids": "2000" if may_ask else "[]"})
    directory.chmod(0o711)
    another = (sys.executable, "-c", AS_ANOTHER)
    with node.daemon():
        if not may_ask:
            directory.chmod(0o700)
        code, found = findings(*settings(node), "--measure", before=another)
        assert code == 0, "what is closed to it is no fault"
        assert found["ssd"]["remedy"] == "run this as user 0 or root"
        assert found["daemon"]["verdict"] == ("ok" if may_ask else "warn"), found["daemon"]
        if not may_ask:
            assert "run this as that user or root" in found["daemon"]["remedy"]
        whose = f"127.0.0.1:{node.http_port} is used by user 0, who also runs the daemon"
        assert found["ports"] == {
            "check": "ports", "verdict": "ok", "found": whose, "remedy": ""
        }  # fmt: skip


def test_a_port_of_the_daemons_user_is_not_the_daemons_for_that(directory: Path) -> None:
    node = RunningNode(directory)
    with node.daemon(), socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        code, found = findings(*settings(node, http__listen=f"127.0.0.1:{port}"))
    assert code == 1
    assert f", used by user {os.geteuid()}" in found["ports"]["found"]
