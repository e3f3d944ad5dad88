"""FaultyTier: a tier whose medium fails when a script, or a seed, says so.

It keeps the contract of tiers, faults included: what it reports as read is right, unless the script
asks for ``SERVE_DAMAGED``, a lie that no tier should tell and that callers may want to survive.
"""

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import TypeVar

from kvtier.core.identity import EVERYTHING, BlockHeader
from kvtier.errors import TierError, TierTimeout
from kvtier.tiers.base import BlockRead, MissReason, Tier
from kvtier.tiers.check import seconds_left
from kvtier.tiers.wrapper import Operation, TierCall, TierWrapper

__all__ = ["Fault", "FaultScript", "FaultyTier", "scripted_faults", "seeded_faults"]

T = TypeVar("T")


class Fault(StrEnum):
    """What goes wrong in one call."""

    FAIL_BEFORE = "fail_before"
    """TierError, and nothing was done."""
    FAIL_AFTER = "fail_after"
    """TierError, although all was done."""
    TIMEOUT_BEFORE = "timeout_before"
    TIMEOUT_AFTER = "timeout_after"
    WAIT = "wait"
    """The call first waits for ``release``, at most until its deadline, then times out."""
    LOSE = "lose"
    """The medium has lost everything when the call comes."""
    FLIP_BIT = "flip_bit"
    """One bit of each payload read is wrong, and the tier notices."""
    TRUNCATE = "truncate"
    """The second half of each payload read is missing, and the tier notices."""
    SERVE_DAMAGED = "serve_damaged"
    """One bit of each payload read is wrong, and the tier says it is right."""


FaultScript = Callable[[TierCall], Fault | None]
"""Asked before each call; None lets it be."""


def scripted_faults(*steps: tuple[Operation, Fault]) -> FaultScript:
    """Return a script of faults, each for the next call of its operation, in order."""
    waiting = list(steps)

    def next_fault(call: TierCall) -> Fault | None:
        if waiting and waiting[0][0] is call.operation:
            return waiting.pop(0)[1]
        return None

    return next_fault


def seeded_faults(
    seed: int,
    rate: float,
    faults: Iterable[Fault] = (
        Fault.FAIL_BEFORE,
        Fault.FAIL_AFTER,
        Fault.TIMEOUT_BEFORE,
        Fault.TIMEOUT_AFTER,
        Fault.FLIP_BIT,
        Fault.TRUNCATE,
    ),
) -> FaultScript:
    """Return a script that lets ``rate`` of all calls fail; the same seed gives the same faults."""
    choices = sorted(faults)
    draw = random.Random(seed)  # noqa: S311  # reproducible, not secret

    def next_fault(_call: TierCall) -> Fault | None:
        return draw.choice(choices) if draw.random() < rate else None

    return next_fault


class FaultyTier(TierWrapper):
    """Makes ``inner`` fail as ``script`` says; ``log`` tells what was done."""

    def __init__(self, inner: Tier, script: FaultScript) -> None:
        super().__init__(inner)
        self.log: list[tuple[Operation, Fault | None]] = []
        self.release = threading.Event()
        """Set it to let calls go that wait."""
        self._script = script
        self._lock = threading.Lock()
        self._current = threading.local()

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        """Make the call with the fault that is next."""
        with self._lock:
            fault = self._script(call)
            self.log.append((call.operation, fault))
        self._current.fault = fault
        match fault:
            case Fault.FAIL_BEFORE:
                raise TierError("a fault was injected before the call")
            case Fault.TIMEOUT_BEFORE:
                raise TierTimeout("a timeout was injected before the call")
            case Fault.WAIT if not self.release.wait(seconds_left(call.deadline_ns)):
                raise TierTimeout("nobody released the call in time")
            case Fault.LOSE:
                self.inner.purge(EVERYTHING, call.deadline_ns)
        result = step()
        match fault:
            case Fault.FAIL_AFTER:
                raise TierError("a fault was injected after the call")
            case Fault.TIMEOUT_AFTER:
                raise TierTimeout("a timeout was injected after the call")
        return result

    @contextlib.contextmanager
    def scratch(self, block_bytes: int, num_blocks: int, deadline_ns: int) -> Iterator[Tier]:
        """Open a scratch tier to which the same faults are injected."""
        with self.inner.scratch(block_bytes, num_blocks, deadline_ns) as inner:
            scratch = copy.copy(self)
            scratch.inner = inner
            yield scratch

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read, and damage what was read where that is the fault."""
        results = super().read(blocks, deadline_ns)
        fault = self._current.fault
        return [self._damage(*each, fault) for each in zip(blocks, results, strict=True)]

    @staticmethod
    def _damage(
        wanted: BlockRead, result: BlockHeader | MissReason, fault: Fault | None
    ) -> BlockHeader | MissReason:
        size = wanted.payload_bytes
        if isinstance(result, MissReason) or size == 0:
            return result
        if fault in {Fault.FLIP_BIT, Fault.SERVE_DAMAGED}:
            wanted.into[size // 2] ^= 1
            return MissReason.CHECKSUM if fault is Fault.FLIP_BIT else result
        if fault is Fault.TRUNCATE:
            wanted.into[size // 2 : size] = bytes(size - size // 2)
            return MissReason.LENGTH
        return result
