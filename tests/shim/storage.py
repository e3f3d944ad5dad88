"""A disk that fails on demand, for a real process: builds and steers ``storage.c``.

::

    with StorageShim(directory / "ssd", scratch) as shim:
        child = Child(command, log_path, shim.environment)
        with shim.suffering({Call.READ: fail(errno.EIO)}):
            ...
        assert shim.num_faults(Call.READ)

Rules
-----
* Only calls on files below the directory are touched, and only in processes started with
  ``environment``; faults begin and end while these run.
* Every call is counted, and so is each one that had a fault: a test that did not hurt proves
  nothing.
* It cannot make a thread unkillable, as a dead NFS server can: a blocked call ends with its
  process. Nor does it see what ``mmap`` and ``io_uring`` do.
"""

import contextlib
import mmap
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.programs import requires

__all__ = ["Action", "Call", "Fault", "StorageShim", "block", "delay", "fail"]

_SOURCE = Path(__file__).with_name("storage.c")
_FLAGS = ("-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-attribute-alias")
_ROW_BYTES = 64
_ACTION = struct.Struct("<I")
_REST = struct.Struct("<II")  # argument, every
_COUNTS = struct.Struct("<IQQ")  # waiting, calls, faults
_REST_AT = 4
_COUNTS_AT = 12
_BUILD_TIMEOUT_S = 60


class Call(IntEnum):
    """A kind of file call: a row of the control file."""

    OPEN_READ = 0
    OPEN_WRITE = 1
    READ = 2
    WRITE = 3
    ALLOCATE = 4
    SYNC = 5
    TRUNCATE = 6
    UNLINK = 7
    """And renaming."""
    STATVFS = 8


class Action(IntEnum):
    """What happens to a call."""

    NONE = 0
    DELAY = 1
    """It starts later, by ``argument`` ms."""
    BLOCK = 2
    """It starts once the fault is lifted."""
    FAIL = 3
    """It returns the error ``argument``."""
    SHORTEN = 4
    """Half of the bytes move, in whole pages, and it says so."""
    FLIP = 5
    """One bit of what was read is another."""
    TEAR = 6
    """Half of the bytes are written (of a single page none), and it tells success."""
    LIE = 7
    """Nothing is done, and it tells success: a sync that does not."""
    FILL = 8
    """The volume has no free bytes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An action that strikes each ``every``-th call of a kind."""

    action: Action
    argument: int = 0
    every: int = 1


def delay(ms: int) -> Fault:
    """Return the fault of a slow disk."""
    return Fault(Action.DELAY, ms)


def block() -> Fault:
    """Return the fault of a disk that hangs."""
    return Fault(Action.BLOCK)


def fail(errno: int, every: int = 1) -> Fault:
    """Return the fault of a disk that answers with an error."""
    return Fault(Action.FAIL, errno, every)


class StorageShim:
    """Faults for what happens below ``directory``; builds in ``scratch``. Use it as a context."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        library = _build(scratch)
        control = scratch / "storage.control"
        control.write_bytes(bytes(mmap.PAGESIZE))
        with control.open("r+b") as file:
            self._rows = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environment = {
            "LD_PRELOAD": str(library),
            "KVTIER_SHIM_DIRECTORY": str(directory),
            "KVTIER_SHIM_CONTROL": str(control),
        }

    def set(self, faults: Mapping[Call, Fault]) -> None:
        """Begin these faults; other kinds of calls keep theirs."""
        for call, fault in faults.items():
            start = call * _ROW_BYTES
            _REST.pack_into(self._rows, start + _REST_AT, fault.argument, fault.every)
            _ACTION.pack_into(self._rows, start, fault.action)  # last: the row is whole then

    def clear(self) -> None:
        """Lift every fault; blocked calls go on."""
        for call in Call:
            _ACTION.pack_into(self._rows, call * _ROW_BYTES, Action.NONE)

    @contextlib.contextmanager
    def suffering(self, faults: Mapping[Call, Fault]) -> Iterator[None]:
        """Have faults within the context; fails unless at least one struck."""
        before = sum(map(self.num_faults, faults))
        self.set(faults)
        try:
            yield
        finally:
            self.clear()
        assert sum(map(self.num_faults, faults)) > before, f"{faults} never struck"

    def num_calls(self, call: Call) -> int:
        """Return how many calls of a kind there were."""
        return self._counts(call)[1]

    def num_faults(self, call: Call) -> int:
        """Return how many calls of a kind had a fault."""
        return self._counts(call)[2]

    def num_waiting(self, call: Call) -> int:
        """Return how many calls of a kind are delayed or blocked now."""
        return self._counts(call)[0]

    def _counts(self, call: Call) -> tuple[int, int, int]:
        waiting, calls, faults = _COUNTS.unpack_from(self._rows, call * _ROW_BYTES + _COUNTS_AT)
        return waiting, calls, faults

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.clear()
        self._rows.close()


def _build(scratch: Path) -> Path:
    library = scratch / "storage.so"
    command = [requires("gcc"), *_FLAGS, "-o", str(library), str(_SOURCE), "-ldl"]
    built = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
    )
    assert built.returncode == 0, built.stderr
    return library
