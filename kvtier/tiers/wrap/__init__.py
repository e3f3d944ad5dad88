"""Tiers around tiers: each adds one thing and keeps the contract."""

from kvtier.tiers.wrap.around import AroundTier, Call, Operation
from kvtier.tiers.wrap.breaker import BreakerState, BreakerTier
from kvtier.tiers.wrap.deadline import DeadlineTier
from kvtier.tiers.wrap.instrument import CallOutcome, InstrumentTier, TierObserver

__all__ = [
    "AroundTier",
    "BreakerState",
    "BreakerTier",
    "Call",
    "CallOutcome",
    "DeadlineTier",
    "InstrumentTier",
    "Operation",
    "TierObserver",
]
