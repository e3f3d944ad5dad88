"""Which daemon a command means: the one that is named, the user's, or the machine's."""

import argparse
from pathlib import Path

import pytest

from kvtier.cli.call import add_target_options, target_from


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a daemon of this user would be; nobody is there."""
    monkeypatch.delenv("KVTIER_DAEMON_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run" / "kvtier" / "kvtier.sock"


@pytest.fixture
def machines(tmp_path: Path) -> Path:
    socket = tmp_path / "machine.sock"
    socket.touch()
    return socket


def meant(machines: Path, *words: str) -> object:
    parser = argparse.ArgumentParser()
    add_target_options(parser)
    return target_from(parser.parse_args(words), machines)


def test_the_machines_is_meant_where_the_user_has_none(users: Path, machines: Path) -> None:
    assert meant(machines) == machines
    users.parent.mkdir(parents=True)
    users.touch()
    assert meant(machines) == users
    users.unlink()
    machines.unlink()
    assert meant(machines) == users, "so the message names the one that was looked for"


def test_one_that_is_named_is_meant_though_nobody_is_there(
    users: Path, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = users.with_name("named.sock")
    assert meant(machines, "--connect", str(named)) == named
    assert meant(machines, "--set", f"daemon.socket={named}") == named
    monkeypatch.setenv("KVTIER_DAEMON_SOCKET", str(named))
    assert meant(machines) == named
