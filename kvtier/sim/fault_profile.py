"""Fault profiles: which faults occur in a run, and how often.

A run has only a few kinds of fault: if everything fails at once, nothing gets far enough to fail in
an interesting way.
"""

import random
from dataclasses import dataclass, fields

__all__ = ["NO_FAULTS", "FaultProfile", "draw_fault_profile"]


@dataclass(frozen=True, slots=True)
class FaultProfile:
    """Chances of faults, each per opportunity."""

    fail_before: float = 0.0
    """A tier's call fails before it has any effect."""
    fail_after: float = 0.0
    """A tier's call fails although it took effect."""
    tear: float = 0.0
    """A write fails and leaves half a block."""
    hang: float = 0.0
    """A tier's call ends long after its deadline."""
    vanish: float = 0.0
    """A tier's call never ends: its thread is lost."""
    stall: float = 0.0
    """A tier is slow for a while."""
    full: float = 0.0
    """A tier rejects new blocks for a while."""
    rot: float = 0.0
    """A bit of a stored block flips."""
    lose: float = 0.0
    """A tier loses a few blocks; if it is a server, all its blocks become unverified."""
    outage: float = 0.0
    """A tier does not answer for a while."""
    scribble: float = 0.0
    """An engine writes into an arena slot that it does not hold."""
    die: float = 0.0
    """An engine dies at any point."""
    crash: float = 0.0
    """The node dies and restarts; the SSD and remote tiers keep their blocks."""
    suspend: float = 0.0
    """The clock jumps, as after a suspend."""
    drop: float = 0.0
    """An operator drops blocks from tiers."""
    detach: float = 0.0
    """An operator drains, detaches or attaches a tier."""
    forget: float = 0.0
    """An engine does not release, does not complete, or stops halfway."""
    dawdle: float = 0.0
    """An engine pauses while it copies, possibly beyond its lease."""
    lie: float = 0.0
    """An engine reports impossible steps and outcomes."""


NO_FAULTS = FaultProfile()
"""No faults at all."""

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
    """Choose the faults of a run."""
    kinds = [kind.name for kind in fields(FaultProfile)]
    chosen = draw.sample(kinds, draw.randint(0, len(kinds)))
    return FaultProfile(**{kind: getattr(_USUAL, kind) for kind in chosen})
