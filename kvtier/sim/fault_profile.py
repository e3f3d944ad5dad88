"""What may go wrong in one run: which faults there are, and how often.

A run has few kinds of fault rather than all: where everything fails at once, nothing gets far
enough to fail in an interesting way.
"""

import random
from dataclasses import dataclass, fields

__all__ = ["NO_FAULTS", "FaultProfile", "draw_fault_profile"]


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """Chances of faults, each per opportunity."""

    fail_before: float = 0.0
    """A tier's call ends in a fault, with nothing done."""
    fail_after: float = 0.0
    """A tier's call ends in a fault, although all was done."""
    tear: float = 0.0
    """A write ends in a fault and leaves half a block behind."""
    hang: float = 0.0
    """A tier's call ends long after its deadline."""
    vanish: float = 0.0
    """A tier's call never ends: its thread is lost."""
    stall: float = 0.0
    """A tier is slow for a while."""
    full: float = 0.0
    """A tier takes nothing in for a while."""
    rot: float = 0.0
    """A bit of a block kept by a tier is wrong from now on."""
    lose: float = 0.0
    """A tier loses a few blocks; if it is a server, all its blocks become unverified."""
    outage: float = 0.0
    """A tier does not answer for a while."""
    scribble: float = 0.0
    """Some engine writes into a slot of the arena that it does not hold."""
    die: float = 0.0
    """An engine dies, in the middle of whatever it does."""
    crash: float = 0.0
    """The node dies and is started anew; the SSD and the remote tier keep what they have."""
    suspend: float = 0.0
    """The clock jumps: the machine slept, or the process was stopped."""
    drop: float = 0.0
    """An operator takes blocks out of tiers."""
    detach: float = 0.0
    """An operator drains a tier, or takes it off, and puts it on again."""
    forget: float = 0.0
    """An engine does not release, does not complete, or stops half-way."""
    dawdle: float = 0.0
    """An engine pauses while it copies, perhaps until after its lease."""
    lie: float = 0.0
    """An engine reports steps and outcomes that cannot be."""


NO_FAULTS = FaultProfile()
"""Nothing goes wrong."""

_USUAL = FaultProfile(
    fail_before=0.1,
    fail_after=0.05,
    tear=0.1,
    hang=0.05,
    vanish=0.01,
    stall=0.1,
    full=0.15,
    rot=0.15,
    lose=0.08,
    outage=0.15,
    scribble=0.15,
    die=0.06,
    crash=0.04,
    suspend=0.05,
    drop=0.1,
    detach=0.06,
    forget=0.12,
    dawdle=0.03,
    lie=0.2,
)


def draw_fault_profile(draw: random.Random) -> FaultProfile:
    """Choose which of the faults this run has."""
    kinds = [kind.name for kind in fields(FaultProfile)]
    chosen = draw.sample(kinds, draw.randint(0, len(kinds)))
    return FaultProfile(**{kind: getattr(_USUAL, kind) for kind in chosen})
