"""Tiers around tiers: each adds one thing and keeps the contract."""

from kvtier.tiers.wrap.around import AroundTier, Operation, TierCall
from kvtier.tiers.wrap.breaker import BreakerState, BreakerTier
from kvtier.tiers.wrap.throttle import ThrottleTier

__all__ = [
    "AroundTier",
    "BreakerState",
    "BreakerTier",
    "Operation",
    "ThrottleTier",
    "TierCall",
]
