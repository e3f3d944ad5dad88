"""Checks: what is looked at, what was found, and what to do about it.

Rules
-----
* A check changes nothing on the machine.
* It has a deadline, and one that hangs keeps nobody: a dead mount is a finding.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from enum import StrEnum

from kvtier.errors import KvtierError, StartError, reason_of

__all__ = ["REMOTE_DEADLINE_S", "Check", "CheckVerdict", "Finding", "examine", "fail", "ok", "warn"]

REMOTE_DEADLINE_S = 5.0
"""For finding the remote tier's servers and asking each; a daemon gives a call far less."""


class CheckVerdict(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """kvtier works, but not as well as it could."""
    FAIL = "fail"
    """kvtier does not start, or a part of it does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; ``remedy`` says what to change unless all is well."""

    verdict: CheckVerdict
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    """Return that all is well."""
    return Finding(CheckVerdict.OK, found)


def warn(found: str, remedy: str) -> Finding:
    """Return what works, but not well."""
    return Finding(CheckVerdict.WARN, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Return what does not work."""
    return Finding(CheckVerdict.FAIL, found, remedy)


@dataclass(frozen=True, slots=True)
class Check:
    """Something to look at; ``look`` may raise, and may hang."""

    name: str
    look: Callable[[], Finding]
    deadline_s: float = 3.0
    if_hung: str = "find out what hangs, with dmesg and /proc/PID/stack"


def examine(checks: Sequence[Check]) -> Iterator[tuple[str, Finding]]:
    """Make all checks at once and yield their names and findings, in order."""
    started_s = time.monotonic()
    begun = [(check, _begin(check)) for check in checks]
    for check, future in begun:
        left_s = started_s + check.deadline_s - time.monotonic()
        try:
            yield check.name, future.result(max(0.0, left_s))
        except FutureTimeout:
            yield check.name, fail(f"no answer within {check.deadline_s:.0f} s", check.if_hung)


def _begin(check: Check) -> "Future[Finding]":
    future: Future[Finding] = Future()
    run = threading.Thread(
        target=lambda: future.set_result(_outcome(check)), name=check.name, daemon=True
    )
    run.start()
    return future


def _outcome(check: Check) -> Finding:
    """Return what a check finds; a fault in it is a finding, and keeps no other from being made."""
    try:
        return check.look()
    except StartError as error:
        return fail(f"{error.field}: {error.problem}", error.remedy)
    except KvtierError as error:
        return fail(str(error), "put that right")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{reason_of(error)}", "put that right")
    except Exception as error:
        return fail(f"this check itself is broken: {error!r}", "report it to kvtier's authors")
