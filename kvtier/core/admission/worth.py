"""Admits a block if it is expected to save more time than it costs.

Theory
------
Worth is measured in seconds that requests save. A block that saves ``s`` seconds of computing and
takes ``r`` to restore is worth ``s * s / (s + r)`` if both proceed at once until they meet, as the
engine does: nearly ``s`` for a fast tier, and little for one far slower than computing. It is
requested again with the learned probability ``p``. Writing it costs a little, since a read may have
to wait for the write:

p * s * s / (s + r)  >  cost

Of the blocks that pay off, the gate passes the share with the highest probability of reuse.
(Ranking by the time saved favoured deep blocks: on a conversation trace, writing half of the blocks
to an SSD of 40,000 blocks below a CPU tier of 4,000, 28.6 % of the tokens were found instead of
30.4 %.)

Writing to the CPU tier is free, and all other tiers are reached through it. So with a slower tier
below, it admits everything, and the gate decides later. Alone, a new chain competes with the blocks
that it would evict once the tier is full.
"""

from collections.abc import Mapping
from typing import Any

from kvtier.core.admission.base import (
    AdmissionDecision,
    Admit,
    Offer,
    OfferReason,
    RefusalRule,
    Reject,
    Throttle,
)
from kvtier.core.admission.gate import QuantileGate
from kvtier.core.cost.fit import table
from kvtier.core.identity import BlockHash
from kvtier.core.limits import TRANSFER_BLOCKS
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History

__all__ = ["AdmitByWorth"]

_NOTICED_SHARE = 0.02
"""Share of the duration of a write that requests notice. Reads go first and have a reserved worker,
so they only wait while the device itself is busy."""

_CHANCE_MIN = 0.05
"""Below this probability twenty blocks are written for each one read: that wears out a drive for
nothing, however little time it takes."""

_WORTHLESS = -1.0
"""Score of a block that does not pay off: no gate passes it, but it counts as offered."""


class AdmitByWorth:
    """An ``Admission``. A tier without a gate accepts whatever pays off.

    ``is_ranked``: the CPU tier evicts by worth, so a new chain may lose against its victims.
    """

    def __init__(
        self,
        history: History,
        planner: Planner,
        gates: Mapping[TierName, QuantileGate],
        *,
        is_ranked: bool,
    ) -> None:
        self.gates = dict(gates)
        self._history = history
        self._planner = planner
        self._is_ranked = is_ranked

    def decide(self, offer: Offer) -> AdmissionDecision:
        """Admit as many leading blocks as pay off and fit."""
        room = (offer.queued_bytes_max - offer.queued_bytes) // offer.payload_bytes
        if room <= 0:
            return Throttle("queue_full")
        if offer.tier is TierName.CPU:
            return self._decide_store(offer, room)
        if offer.reason in {OfferReason.STORED, OfferReason.USED}:
            return Admit(min(offer.num_blocks, room))  # the configuration requires it
        return self._decide_demotion(offer, room)

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Lower a gate to the write budget."""
        if tier in self.gates:
            self.gates[tier].note_allowance(bytes_per_s)

    def document(self) -> Mapping[str, Any]:
        """Return the state of the gates."""
        return {"gates": {str(tier): gate.document() for tier, gate in self.gates.items()}}

    def recall(self, document: Mapping[str, Any]) -> str:
        """Restore the learned state of an earlier run; returns the problem, or ``""``."""
        try:
            gates = table(document, "gates")
            for tier, gate in self.gates.items():
                if tier in gates:
                    gate.recall(table(gates, tier))
        except ValueError as fault:
            return str(fault)
        return ""

    def _decide_store(self, offer: Offer, room: int) -> AdmissionDecision:
        num_pushing = offer.num_blocks - offer.num_spare
        is_judged = self._is_ranked and offer.use is not None and not offer.is_way_down
        if not is_judged or num_pushing <= 0:
            return Admit(min(offer.num_blocks, room))
        assert offer.use is not None
        num_worth = offer.num_spare + self._history.queues.would_stay(
            offer.use, num_pushing, offer.tier
        )
        if not num_worth:
            return Reject(RefusalRule.WORTH)
        return Admit(
            min(num_worth, room), RefusalRule.FULL if room < num_worth else RefusalRule.WORTH
        )

    def _decide_demotion(self, offer: Offer, room: int) -> AdmissionDecision:
        """Admit leading blocks up to the first one that does not pay off or does not pass."""
        chances = self._history.p_reuse(offer.keys)
        gate = self.gates.get(offer.tier)
        for place, chance in enumerate(chances[:room]):
            key = offer.keys[place]
            _, num_children = self._history.uses_and_children(offer.tier, key)
            if offer.is_needed or num_children:
                rule = self._count_needed(gate, offer)
            else:
                end_tokens = (offer.first_position + place + 1) * offer.block_tokens
                rule = self._refusal(gate, offer, chance, end_tokens, key)
            if rule is not None:
                return Admit(place, rule) if place else Reject(rule)
        return Admit(min(offer.num_blocks, room))

    def _refusal(
        self,
        gate: QuantileGate | None,
        offer: Offer,
        chance: float,
        end_tokens: int,
        key: BlockHash,
    ) -> RefusalRule | None:
        """Return the rule that refuses a block, or None."""
        worth_s = chance * self._worth_s(offer, end_tokens)
        does_pay = chance >= _CHANCE_MIN and worth_s > _NOTICED_SHARE * self._restore_s(offer)
        if gate is None:
            return None if does_pay else RefusalRule.WORTH
        score = chance if does_pay else _WORTHLESS
        if offer.reason is OfferReason.LEAVING:
            is_taken = gate.take(score, key, num_bytes=offer.payload_bytes, now_ns=offer.now_ns)
        else:
            is_taken = gate.would_take(score, key)
        if not does_pay:
            return RefusalRule.WORTH
        return None if is_taken else RefusalRule.BUDGET

    def _worth_s(self, offer: Offer, end_tokens: int) -> float:
        """Return the seconds saved by having a block in the tier when it is requested."""
        saved_s = self._planner.saved_s(end_tokens, offer.block_tokens, offer.key_space)
        both_s = saved_s + self._restore_s(offer)
        return saved_s * saved_s / both_s if both_s > 0 else 0.0

    def _restore_s(self, offer: Offer) -> float:
        """Return one block's share of the duration of a transfer."""
        num_bytes = TRANSFER_BLOCKS * offer.payload_bytes
        return self._planner.restore_s(offer.tier, num_bytes) / TRANSFER_BLOCKS

    @staticmethod
    def _count_needed(gate: QuantileGate | None, offer: Offer) -> None:
        if gate is not None and offer.reason is OfferReason.LEAVING:
            gate.take_needed(num_bytes=offer.payload_bytes, now_ns=offer.now_ns)
