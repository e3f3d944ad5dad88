"""Tiers around tiers: each adds one thing and keeps the contract."""

from kvtier.tiers.wrap.around import AroundTier, Call, Operation
from kvtier.tiers.wrap.breaker import BreakerState, BreakerTier
from kvtier.tiers.wrap.throttle import ThrottleTier

__all__ = [
    "AroundTier",
    "BreakerState",
    "BreakerTier",
    "Call",
    "Operation",
    "ThrottleTier",
]
