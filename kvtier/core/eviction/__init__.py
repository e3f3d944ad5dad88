"""Eviction policies: which blocks leave the CPU tier first. ``registry`` lists them."""

from kvtier.core.eviction.registry import (
    EVICTION_POLICIES,
    EvictionPolicy,
    own_order_of,
    policy_help,
)

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "own_order_of", "policy_help"]
