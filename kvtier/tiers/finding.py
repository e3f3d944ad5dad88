"""Findings of ``kvtier doctor``, and the checks that a tier declares.

Rules
-----
* A check changes nothing on the machine.
* It has a deadline. A hanging check does not delay others: a mount that does not answer is a
  finding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

__all__ = ["CheckVerdict", "Finding", "KernelFiles", "TierCheck", "fail", "ok", "warn"]


class CheckVerdict(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """kvtier works, but not as well as it could."""
    FAIL = "fail"
    """kvtier does not start, or a part of it does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; ``remedy`` says what to change unless all is well."""

    verdict: CheckVerdict
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    """Return a finding of no problem."""
    return Finding(CheckVerdict.OK, found)


def warn(found: str, remedy: str) -> Finding:
    """Return a finding of something that works, but not well."""
    return Finding(CheckVerdict.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(CheckVerdict.FAIL, found, remedy)


@dataclass(frozen=True)
class KernelFiles:
    """The kernel's files below ``root``, which is another directory in tests."""

    root: Path = Path("/")

    def read(self, name: str) -> str:
        """Return the content of a file such as ``proc/swaps``; empty if it cannot be read."""
        try:
            return (self.root / name).read_text(errors="replace").strip()
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class TierCheck:
    """One check of a tier; ``inspect`` may raise, and may hang."""

    name: str
    inspect: Callable[[KernelFiles], Finding]
    if_hung: str
    """Remedy if the check does not end in time."""
    deadline_s: float = 3.0
    is_private: bool = False
    """Only root and the daemon's own user can run it."""
    is_measurement: bool = False
    """It takes long and loads the device, so it runs only on request, and alone."""
