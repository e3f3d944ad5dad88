"""Which blocks leave the CPU tier first."""

from kvtier.core.eviction.base import Eviction
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.eviction.run_density import CreditLru, RunDensity
from kvtier.core.eviction.s3_fifo import S3Fifo

__all__ = ["CreditLru", "Eviction", "LeafLru", "RunDensity", "S3Fifo"]
