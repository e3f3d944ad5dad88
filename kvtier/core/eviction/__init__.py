"""Which blocks leave the CPU tier first."""

from kvtier.core.eviction.base import Eviction
from kvtier.core.eviction.leaf_lru import LeafLru

__all__ = ["Eviction", "LeafLru"]
