"""Admission by worth: a block is taken where it is expected to save more than it costs.

Theory
------
The currency is seconds that requests are spared. A block that saves ``s`` seconds of computing and
takes ``r`` to restore is worth ``s * s / (s + r)`` where both go on at once until they meet, which
is what the engine does; that is nearly ``s`` for a fast tier, and little for one far slower than
computing. It is asked for again with probability ``p``, learned by what came back. Writing it costs
a little, since a read may have to wait for it:

    p * s * s / (s + r)  >  cost

Among those that pay, the gate lets the share through that most likely comes back. (Ranked by what
each saves, deep blocks won: of a conversation trace, with half of the blocks written to an SSD of
40,000 below a CPU tier of 4,000, 28.6 % of the tokens were found and not 30.4.)

The CPU tier costs nothing to write to. It is the way to the others as well, so with one of them
below it takes all, and the gate sees all; alone, it has a new chain compete with what it would push
out, once there is no free room.
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
from kvtier.core.limits import TRANSFER_BLOCKS
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.reuse.history import History

__all__ = ["AdmitByWorth"]

_FELT_SHARE = 0.02
"""Of the time a write takes, what requests feel of it. Reads go first and a worker is kept for
them, so they wait only where the medium itself is busy."""

_CHANCE_MIN = 0.05
"""Of what comes back more seldom twenty blocks are written for one that is read: that wears a drive
out for nothing, however little time it takes."""

_WORTHLESS = -1.0
"""The score of what does not pay: no gate lets it through, though it counts as offered."""


class AdmitByWorth:
    """An ``Admission``. A tier without a gate takes whatever pays.

    ``is_ranked``: the CPU tier evicts by worth too, so that a chain may lose at once.
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
        """Take as many leading blocks as pay, and as there is room for."""
        room = (offer.queued_bytes_max - offer.queued_bytes) // offer.payload_bytes
        if room <= 0:
            return Throttle("queue_full")
        if offer.tier is TierName.CPU:
            return self._decide_store(offer, room)
        if offer.reason in {OfferReason.STORED, OfferReason.USED}:
            return Admit(min(offer.num_blocks, room))  # as configured, whatever they are worth
        return self._decide_demotion(offer, room)

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Lower a gate to what may be written."""
        if tier in self.gates:
            self.gates[tier].note_allowance(bytes_per_s)

    def document(self) -> Mapping[str, Any]:
        """Return where the gates are, to be kept."""
        return {"gates": {str(tier): gate.document() for tier, gate in self.gates.items()}}

    def recall(self, document: Mapping[str, Any]) -> str:
        """Begin with what an earlier run learned; returns what makes no sense in it, or ``""``."""
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
        num_worth = offer.num_spare + self._history.orders.would_stay(
            offer.use, num_pushing, offer.tier
        )
        if not num_worth:
            return Reject(RefusalRule.WORTH)
        return Admit(
            min(num_worth, room), RefusalRule.FULL if room < num_worth else RefusalRule.WORTH
        )

    def _decide_demotion(self, offer: Offer, room: int) -> AdmissionDecision:
        """Take leading blocks up to the first that does not pay, or that the gate refuses."""
        chances = self._history.p_reuse(offer.keys)
        gate = self.gates.get(offer.tier)
        for place, chance in enumerate(chances[:room]):
            key = offer.keys[place]
            if offer.is_needed or self._history.num_children(offer.tier, key):
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
        key: bytes,
    ) -> RefusalRule | None:
        """Return what refuses a block, if anything does."""
        worth_s = chance * self._worth_s(offer, end_tokens)
        does_pay = chance >= _CHANCE_MIN and worth_s > _FELT_SHARE * self._restore_s(offer)
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
        """Return what it saves to have a block in the tier when it is asked for."""
        saved_s = self._planner.saved_s(end_tokens, offer.block_tokens, offer.key_space)
        both_s = saved_s + self._restore_s(offer)
        return saved_s * saved_s / both_s if both_s > 0 else 0.0

    def _restore_s(self, offer: Offer) -> float:
        """Return what one block's share of a transfer takes."""
        num_bytes = TRANSFER_BLOCKS * offer.payload_bytes
        return self._planner.restore_s(offer.tier, num_bytes) / TRANSFER_BLOCKS

    @staticmethod
    def _count_needed(gate: QuantileGate | None, offer: Offer) -> None:
        if gate is not None and offer.reason is OfferReason.LEAVING:
            gate.take_needed(num_bytes=offer.payload_bytes, now_ns=offer.now_ns)
