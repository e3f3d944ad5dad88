"""Admission of everything the way has room for: the baseline that other policies must beat."""

from kvtier.core.admission.base import Admit, Offer, Throttle, Verdict
from kvtier.core.residency import TierName

__all__ = ["AdmitEverything"]


class AdmitEverything:
    """An ``Admission`` without an opinion; sheds what the queue to a slower tier cannot hold."""

    def judge(self, offer: Offer) -> Verdict:
        """Admit as many leading blocks as the queue has room for."""
        room = (offer.queued_bytes_max - offer.queued_bytes) // offer.payload_bytes
        if room <= 0:
            return Throttle("queue_full")
        return Admit(min(offer.num_blocks, room))

    def note_allowance(self, tier: TierName, bytes_per_s: float | None) -> None:
        """Leave budgets to the tiers, which keep them anyway."""
