"""The seam between a tier and the policy that guards its door; three answers, as values."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.core.residency import TierName
from kvtier.core.reuse.history import Use

__all__ = [
    "Admission",
    "AdmissionDecision",
    "Admit",
    "AdmitEverything",
    "Offer",
    "OfferReason",
    "RefusalRule",
    "Reject",
    "Throttle",
]


class OfferReason(StrEnum):
    """Why blocks are offered to a tier just now."""

    STORED = "stored"
    """An engine has computed them."""
    USED = "used"
    """They were asked for once more."""
    LEAVING = "leaving"
    """They will have to leave the CPU tier soon."""
    LINGERING = "lingering"
    """They have been in the CPU tier for long, and the daemon might crash."""
    CLOSING = "closing"
    """The daemon is about to stop."""


class RefusalRule(StrEnum):
    """What refused a block; each is a label of ``kvtier_refused_blocks_total``."""

    WORTH = "worth"
    """It is expected to save less than it costs, or than what it would push out."""
    DEPTH = "depth"
    """It lies beyond ``max_offload_tokens``."""
    BUDGET = "budget"
    """It is not in the share that is written."""
    SECOND_USE = "second_use"
    """It was asked for once only."""
    FULL = "full"
    """There was no room, or the way there was full."""


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
    reason: OfferReason = OfferReason.STORED
    use: Use | None = None
    """To the CPU tier: the request that offers them."""
    num_spare: int = 0
    """To the CPU tier: how many of them fit without pushing anything out."""
    is_way_down: bool = False
    """To the CPU tier: what has to leave it is offered to a slower one."""
    keys: Sequence[bytes] = ()
    """To a slower tier: their hashes."""
    block_tokens: int = 1
    key_space: bytes = b""
    is_needed: bool = False
    """The tier has a child of the last one, that is found through it alone."""
    now_ns: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Take the first ``num_blocks`` of what was offered; the others are refused by ``rule``."""

    num_blocks: int
    rule: RefusalRule = RefusalRule.FULL


@dataclass(frozen=True, slots=True)
class Reject:
    """Take none, because they do not pay."""

    rule: RefusalRule


@dataclass(frozen=True, slots=True)
class Throttle:
    """Take none now, because the way there is full; ``reason`` is a metric label."""

    reason: str


AdmissionDecision = Admit | Reject | Throttle


class Admission(Protocol):
    """Answers for each offer. Holds statistics at most; moves nothing."""

    def decide(self, offer: Offer) -> AdmissionDecision:
        """Decide about an offer."""

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Take what may be written to a tier for the time being; None: as much as there is."""


class AdmitEverything:
    """An ``Admission`` without an opinion; sheds what the queue to a slower tier cannot hold."""

    def decide(self, offer: Offer) -> AdmissionDecision:
        """Admit as many leading blocks as the queue has room for."""
        room = (offer.queued_bytes_max - offer.queued_bytes) // offer.payload_bytes
        if room <= 0:
            return Throttle("queue_full")
        return Admit(min(offer.num_blocks, room))

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Leave budgets to the tiers, which keep them anyway."""
