"""Tests ask for the programs they run, and continuous integration installs every one of them."""

import subprocess
from pathlib import Path

import pytest

from tests.programs import PROGRAMS, missing, requires

CI = Path(__file__).resolve().parents[2] / ".ci" / "run"


def test_a_program_that_no_test_has_asked_for_is_not_started() -> None:
    with pytest.raises(AssertionError, match="gdb is started without"):
        subprocess.run(["gdb"], check=False)


def test_a_missing_program_skips_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="missing program: zsh"):
        requires("zsh")


def test_a_missing_program_fails_a_test_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"zsh; \.ci/run has to install zsh"):
        requires("zsh")


def test_the_report_says_what_was_not_covered_and_how_to_install_it() -> None:
    reasons = ["Skipped: missing program: zsh", "Skipped: only root can mount"]
    reasons.append(reasons[0])
    assert missing(reasons) == [
        "zsh: 2 tests skipped (shell completion in zsh); apt-get install zsh"
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_ci_installs_it(name: str) -> None:
    assert all(package in CI.read_text() for package in PROGRAMS[name].package.split())
