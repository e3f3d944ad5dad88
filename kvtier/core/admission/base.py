"""The seam between a tier and the policy that guards its door; three answers, as values."""

from dataclasses import dataclass
from typing import Protocol

from kvtier.core.residency import TierName

__all__ = ["Admission", "Admit", "Offer", "Reject", "Throttle", "Verdict"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of one chain that could go to a tier."""

    tier: TierName
    num_blocks: int
    first_position: int
    payload_bytes: int
    """Of one block."""
    queued_bytes: int
    """What already waits to be written to that tier."""
    queued_bytes_max: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Take the first ``num_blocks`` of what was offered."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Take none, because they do not pay; ``reason`` is a metric label."""

    reason: str


@dataclass(frozen=True, slots=True)
class Throttle:
    """Take none now, because the way there is full; ``reason`` is a metric label."""

    reason: str


Verdict = Admit | Reject | Throttle


class Admission(Protocol):
    """Answers for each offer. Holds statistics at most; moves nothing."""

    def judge(self, offer: Offer) -> Verdict:
        """Decide about an offer."""
