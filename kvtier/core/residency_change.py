"""A change in which blocks a tier holds, as the node reports it to clients."""

from dataclasses import dataclass

from kvtier.core.residency import TierName
from kvtier.core.table import Keys, as_keys

__all__ = ["RESYNC", "ResidencyChange"]


@dataclass(frozen=True, slots=True)
class ResidencyChange:
    """Blocks that a tier now holds, or no longer holds, in the order of the changes."""

    tier: TierName | None
    """None: earlier changes are void, and the complete contents follow."""
    is_there: bool
    keys: Keys


RESYNC = ResidencyChange(None, is_there=False, keys=as_keys(b""))
"""The first change of a feed, and the first one after a gap."""
