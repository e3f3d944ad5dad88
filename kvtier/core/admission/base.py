"""The interface of admission policies, and the policy that admits everything."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvtier.core.identity import BlockHash
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
    """Why blocks are offered to a tier."""

    STORED = "stored"
    """An engine has computed them."""
    USED = "used"
    """They were requested again."""
    LEAVING = "leaving"
    """They are about to be evicted from the CPU tier."""
    LINGERING = "lingering"
    """They have been in the CPU tier for long, and would be lost if the daemon crashed."""
    CLOSING = "closing"
    """The daemon is about to stop."""


class RefusalRule(StrEnum):
    """Why a block was refused: each is a label value of ``kvtier_refused_blocks_total``."""

    WORTH = "worth"
    """It is expected to save less than it costs, or less than the blocks it would evict."""
    DEPTH = "depth"
    """It lies beyond ``max_offload_tokens``."""
    BUDGET = "budget"
    """It is outside the share that is written."""
    SECOND_USE = "second_use"
    """It was requested only once."""
    FULL = "full"
    """The tier, or the queue to it, was full."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Consecutive blocks of one chain that could be stored in a tier."""

    tier: TierName
    num_blocks: int
    first_position: int
    payload_bytes: int
    """Payload of one block."""
    queued_bytes: int
    """Bytes already queued to be written to that tier."""
    queued_bytes_max: int
    reason: OfferReason = OfferReason.STORED
    use: Use | None = None
    """The request that offers them; only for the CPU tier."""
    num_spare: int = 0
    """How many of them fit without evicting a block; only for the CPU tier."""
    is_way_down: bool = False
    """Whether evicted blocks are offered to a slower tier; only for the CPU tier."""
    keys: Sequence[BlockHash] = ()
    """Block hashes; only for slower tiers."""
    block_tokens: int = 1
    key_space: bytes = b""
    is_needed: bool = False
    """The tier has a child of the last block, which can only be found through it."""
    now_ns: int = 0


@dataclass(frozen=True, slots=True)
class Admit:
    """Accept the first ``num_blocks`` of the offer; ``rule`` refuses the others."""

    num_blocks: int
    rule: RefusalRule = RefusalRule.FULL


@dataclass(frozen=True, slots=True)
class Reject:
    """Accept none, because they do not pay off."""

    rule: RefusalRule


@dataclass(frozen=True, slots=True)
class Throttle:
    """Accept none now, because the queue is full; ``reason`` is a metric label."""

    reason: str


AdmissionDecision = Admit | Reject | Throttle


class Admission(Protocol):
    """Decides which offered blocks a tier accepts. May keep statistics; moves no blocks."""

    def decide(self, offer: Offer) -> AdmissionDecision:
        """Return how much of an offer to accept, or why it is refused."""

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Set the current write budget of a tier; None: unlimited."""


class AdmitEverything:
    """Admits whatever fits into the queue: the baseline that other policies must beat."""

    def decide(self, offer: Offer) -> AdmissionDecision:
        """Admit as many leading blocks as the queue has room for."""
        room = (offer.queued_bytes_max - offer.queued_bytes) // offer.payload_bytes
        if room <= 0:
            return Throttle("queue_full")
        return Admit(min(offer.num_blocks, room))

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Ignore budgets: the tiers enforce them anyway."""
