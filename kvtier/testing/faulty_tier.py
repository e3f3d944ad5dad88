"""FaultyTier: a tier whose device fails according to a script or a seed.

It keeps the tier contract even when it fails: blocks reported as read are correct, unless the
script asks for ``SERVE_DAMAGED``, which no tier should do and callers may want to survive.
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
    """A fault in one call."""

    FAIL_BEFORE = "fail_before"
    """TierError before the call has any effect."""
    FAIL_AFTER = "fail_after"
    """TierError after the call took effect."""
    TIMEOUT_BEFORE = "timeout_before"
    TIMEOUT_AFTER = "timeout_after"
    WAIT = "wait"
    """The call waits for ``release``, until its deadline at most, and then times out."""
    LOSE = "lose"
    """The device has lost all blocks before the call."""
    FLIP_BIT = "flip_bit"
    """One bit of each payload read is wrong, and the tier notices."""
    TRUNCATE = "truncate"
    """The second half of each payload read is missing, and the tier notices."""
    SERVE_DAMAGED = "serve_damaged"
    """One bit of each payload read is wrong, and the tier reports it as correct."""


FaultScript = Callable[[TierCall], Fault | None]
"""Called before each call; None causes no fault."""


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
    """Return a script in which ``rate`` of all calls fail; a seed repeats exactly."""
    choices = sorted(faults)
    draw = random.Random(seed)  # noqa: S311  # reproducible, not secret

    def next_fault(_call: TierCall) -> Fault | None:
        return draw.choice(choices) if draw.random() < rate else None

    return next_fault


class FaultyTier(TierWrapper):
    """Makes ``inner`` fail according to ``script``; ``log`` lists the calls and their faults."""

    def __init__(self, inner: Tier, script: FaultScript) -> None:
        super().__init__(inner)
        self.log: list[tuple[Operation, Fault | None]] = []
        self.release = threading.Event()
        """Set it to release waiting calls."""
        self._script = script
        self._lock = threading.Lock()
        self._current = threading.local()

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        """Make the call with the next fault."""
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
                raise TierTimeout("the call was not released in time")
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
        """Open a scratch tier with the same faults."""
        with self.inner.scratch(block_bytes, num_blocks, deadline_ns) as inner:
            scratch = copy.copy(self)
            scratch.inner = inner
            yield scratch

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read, and damage the results if that is the fault."""
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
