"""The shim itself: each fault strikes the calls it is meant for, and only below its directory."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import Child, await_true
from tests.shim.storage import Action, Call, Fault, StorageShim, block, delay, fail

PAGE = 4096

SCRIPT = """
import os, sys
directory, verb = sys.argv[1:]
path = os.path.join(directory, "file")
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
try:
    if verb == "write":
        print(os.pwritev(fd, [b"a" * 4096, b"b" * 4096], 0))
    elif verb == "write_page":
        print(os.pwrite(fd, b"c" * 4096, 0))
    elif verb == "append":
        print(os.write(fd, b"d" * 100))
    elif verb == "read":
        print(os.pread(fd, 8192, 0).hex())
    elif verb == "readv":
        pieces = [bytearray(4096), bytearray(4096)]
        print(os.preadv(fd, pieces, 0), b"".join(pieces).hex())
    elif verb == "allocate":
        os.posix_fallocate(fd, 0, 8192)
    elif verb == "sync":
        os.fsync(fd)
        os.fdatasync(fd)
    elif verb == "truncate":
        os.ftruncate(fd, 1)
    elif verb == "unlink":
        os.unlink(path)
    elif verb == "free":
        print(os.statvfs(directory).f_bavail)
except OSError as error:
    print("error", error.errno)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "watched").mkdir()
    (tmp_path / "other").mkdir()
    return tmp_path / "watched"


@pytest.fixture
def shim(directory: Path, tmp_path: Path) -> Iterator[StorageShim]:
    with StorageShim(directory, tmp_path) as shim:
        yield shim


def said(shim: StorageShim, directory: Path, verb: str) -> str:
    """Return what the script says."""
    child = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT, str(directory), verb],
        env=os.environ | shim.environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=30,
    )
    return child.stdout.strip()


def test_without_faults_calls_are_only_counted(shim: StorageShim, directory: Path) -> None:
    assert said(shim, directory, "write") == "8192"
    assert said(shim, directory, "readv") == f"8192 {'61' * PAGE}{'62' * PAGE}"
    assert [shim.num_calls(call) for call in (Call.OPEN_WRITE, Call.WRITE, Call.READ)] == [2, 1, 1]
    assert not any(map(shim.num_faults, Call))


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("write", Call.WRITE),
        ("write_page", Call.WRITE),
        ("append", Call.WRITE),
        ("read", Call.READ),
        ("readv", Call.READ),
        ("allocate", Call.ALLOCATE),
        ("sync", Call.SYNC),
        ("truncate", Call.TRUNCATE),
        ("unlink", Call.UNLINK),
        ("free", Call.STATVFS),
    ],
)
def test_an_error_is_the_calls_own(
    shim: StorageShim, directory: Path, verb: str, call: Call
) -> None:
    with shim.suffering({call: fail(errno.EIO)}):
        assert said(shim, directory, verb) == f"error {errno.EIO}"
        assert not said(shim, directory.with_name("other"), verb).startswith("error")
    assert not said(shim, directory, verb).startswith("error")


def test_every_third_call(shim: StorageShim, directory: Path) -> None:
    with shim.suffering({Call.WRITE: fail(errno.ENOSPC, every=3)}):
        assert [said(shim, directory, "write")[:5] for _ in range(3)] == ["8192", "8192", "error"]
    assert shim.num_faults(Call.WRITE) == 1


def test_bytes_that_do_not_arrive(shim: StorageShim, directory: Path) -> None:
    said(shim, directory, "write")
    with shim.suffering({Call.READ: Fault(Action.SHORTEN)}):
        assert said(shim, directory, "read") == "61" * PAGE
    with shim.suffering({Call.READ: Fault(Action.FLIP)}):
        read = bytes.fromhex(said(shim, directory, "readv").split()[1])
        wrong = [a ^ b for a, b in zip(read, b"a" * PAGE + b"b" * PAGE, strict=True) if a != b]
        assert [byte.bit_count() for byte in wrong] == [1], "one bit"
    (directory / "file").write_bytes(bytes(2 * PAGE))
    with shim.suffering({Call.WRITE: Fault(Action.TEAR)}):
        assert said(shim, directory, "write") == "8192", "it tells success"
        assert said(shim, directory, "write_page") == "4096"
    assert (directory / "file").read_bytes() == b"a" * PAGE + bytes(PAGE)
    with shim.suffering({Call.WRITE: Fault(Action.SHORTEN)}):
        assert said(shim, directory, "write") == "4096"


def test_a_volume_that_is_full_and_a_sync_that_lies(shim: StorageShim, directory: Path) -> None:
    with shim.suffering({Call.STATVFS: Fault(Action.FILL)}):
        assert said(shim, directory, "free") == "0"
    assert int(said(shim, directory, "free")) > 0
    with shim.suffering({Call.SYNC: Fault(Action.LIE)}):
        assert said(shim, directory, "sync") == ""
    assert shim.num_faults(Call.SYNC) == 2


def test_a_call_that_hangs_ends_when_it_is_released(
    shim: StorageShim, directory: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-S", "-c", SCRIPT, str(directory), "write"]
    shim.set({Call.WRITE: block()})
    with Child(command, tmp_path / "log", shim.environment) as child:
        await_true(lambda: shim.num_waiting(Call.WRITE) == 1, "the write hangs")
        assert child.is_running
        shim.clear()
        assert child.wait() == 0
    with shim.suffering({Call.WRITE: delay(1)}):
        assert said(shim, directory, "write") == "8192"
    assert shim.num_waiting(Call.WRITE) == 0
