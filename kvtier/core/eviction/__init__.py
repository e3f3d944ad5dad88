"""Eviction policies: which blocks leave the CPU tier first."""

from kvtier.core.eviction.base import Eviction
from kvtier.core.eviction.leaf_lru import LeafLru
from kvtier.core.eviction.registry import (
    EVICTION_POLICIES,
    EvictionPolicy,
    own_order_of,
    policy_help,
)
from kvtier.core.eviction.run_density import CreditLru, RunDensity
from kvtier.core.eviction.s3_fifo import S3Fifo

__all__ = [
    "EVICTION_POLICIES",
    "CreditLru",
    "Eviction",
    "EvictionPolicy",
    "LeafLru",
    "RunDensity",
    "S3Fifo",
    "own_order_of",
    "policy_help",
]
