"""What is shipped for systemd is what systemd takes, and fits the daemon's own settings."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtier.config import load_config
from tests.programs import requires

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
UNIT = DEPLOY / "kvtier.service"

EXPOSURE_MOST = 15
"""Of 100; what is left is the network and the sockets, which it is for."""


@pytest.fixture(autouse=True)
def systemd() -> None:
    requires("systemd")


def setting(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)
    return str(value)


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("with_engine", [False, True], ids=["daemon", "engine"])
def test_the_unit_is_one(tmp_path: Path, with_engine: bool) -> None:
    unit = tmp_path / "kvtier.service"
    unit.write_text(UNIT.read_text().replace("/opt/kvtier/bin/kvtier", "/bin/true"))
    if with_engine:
        (tmp_path / "kvtier.service.d").mkdir()
        shutil.copy(DEPLOY / "engine.conf", tmp_path / "kvtier.service.d")
    done = run("systemd-analyze", "verify", unit)
    assert done.returncode == 0, done.stderr
    assert "kvtier" not in done.stderr, done.stderr


def test_the_unit_exposes_little() -> None:
    most = f"--threshold={EXPOSURE_MOST}"
    done = run("systemd-analyze", "security", "--offline=true", "--no-pager", most, UNIT)
    assert done.returncode == 0, done.stdout


def test_the_unit_fits_the_settings() -> None:
    config = load_config(DEPLOY / "kvtier.toml", {}, {})
    assert config.daemon.socket.parent == Path("/run") / setting("RuntimeDirectory")
    assert config.tiers["ssd"].directory == Path("/var/cache") / setting("CacheDirectory")
    assert f"--config /etc/{setting('ConfigurationDirectory')}/kvtier.toml" in setting("ExecStart")
    grace_s = config.daemon.stop_grace_ns / 1e9
    assert float(setting("TimeoutStopSec").removesuffix("s")) >= grace_s + 5


def test_users_and_folders_are_what_the_unit_names(tmp_path: Path) -> None:
    users = run("systemd-sysusers", "--dry-run", DEPLOY / "kvtier.sysusers.conf")
    assert users.returncode == 0, users.stderr
    assert f"Creating user '{setting('User')}'" in users.stdout + users.stderr
    # The machine of test_systemd_unit makes them for real.
    folders = (DEPLOY / "kvtier.tmpfiles.conf").read_text()
    for name, place in (("RuntimeDirectory", "/run"), ("CacheDirectory", "/var/cache")):
        wanted = ("d", f"{place}/{setting(name)}", setting(f"{name}Mode"), "kvtier", "kvtier")
        assert wanted in [tuple(line.split()[:5]) for line in folders.splitlines()]
