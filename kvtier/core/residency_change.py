"""What came to a tier, or left it: as the node tells it, and a client hears it."""

from dataclasses import dataclass

from kvtier.core.residency import TierName
from kvtier.core.table import Keys, as_keys

__all__ = ["RESYNC", "ResidencyChange"]


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """Blocks that a tier has from now on, or has no more, in the order in which it happened."""

    tier: TierName | None
    """None: nothing that was told before counts, and all that is there is told again."""
    is_there: bool
    keys: Keys


RESYNC = ResidencyChange(None, is_there=False, keys=as_keys(b""))
"""What a feed begins with, and goes on with after a gap."""
