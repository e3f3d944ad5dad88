"""``kvtier config`` as its user sees it: what it says, where, and its exit codes."""

import json
import tomllib
from pathlib import Path

import pytest

from kvtier.cli.main import main

SMALL = "cpu.capacity=8MiB", "cpu.slab=1MiB", "ssd.capacity=8MiB", "ssd.segment=1MiB"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_REMOTE_URL", raising=False)


def sets(*settings: str) -> list[str]:
    return [word for each in settings for word in ("--set", each)]


def test_what_is_good_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "kvtier.toml"
    path.write_text("[cpu]\ncapacity = '8GiB'\n")
    assert main(["config", "check", "--config", str(path), *sets("cpu.slab=1MiB")]) == 0
    assert capsys.readouterr() == (f"{path}: OK (2 keys set)\n", "")


def test_what_is_wrong_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", *sets("cpu.capacity=1", "ssd.gate=2.0", "nothing.at=all")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[1] for line in err.splitlines()] == [
        " nothing.at",
        " cpu.capacity",
        " ssd.gate",
    ]
    assert all("(command line); " in line for line in err.splitlines())


def test_the_machine_is_checked_and_left_as_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = (
        f"daemon.socket={tmp_path}/run/deep/k.sock",
        f"ssd.directory={tmp_path}/ssd",
        "http.listen=127.0.0.1:0",
        "ssd.free_space_floor=0",
    )
    check = ["config", "check", "--machine", *sets(*SMALL, *places)]
    assert main(check) == 0
    assert capsys.readouterr().out.endswith("machine: OK\n")
    lacking = (f"engine.model={tmp_path}/none", "ssd.free_space_floor=900000TiB")
    assert main([*check, *sets(*lacking)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in err] == [" ssd.capacity", " engine.model"]
    assert all("(command line); " in line for line in err)
    assert list(tmp_path.iterdir()) == []


def test_what_is_set_is_shown_or_all_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_REMOTE_URL", "redis://u:hunter2@h")
    show = ["config", "show", *sets("cpu.slab=1MiB")]
    assert main(show) == 0
    assert capsys.readouterr().out.splitlines() == [
        "[cpu]",
        'slab = "1MiB"            # command line',
        "",
        "[remote]",
        '# url = "redis://***@h"  # KVTIER_REMOTE_URL',
    ]
    assert main([*show, "--effective"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert tomllib.loads(out)["ssd"]["capacity"] == "20GiB"
    assert main([*show, "--effective", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cpu.slab"] == {"value": "1MiB", "source": "command line", "reload": "restart"}
    assert found["remote.url"]["value"] == "redis://***@h"


def test_what_asks_a_daemon_says_when_there_is_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    socket = ["--connect", str(tmp_path / "k.sock")]
    for words in (["reload"], ["show", "--running"]):
        assert main(["config", *words, *socket]) == 2
        assert "daemon.socket" in capsys.readouterr().err
    assert main(["config", "show", *socket]) == 2
    assert "add --running" in capsys.readouterr().err


def test_nothing_set_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out == "# all keys are at their defaults\n"


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["ssd"]["properties"]["gate"]
