"""What an engine and its client go by: answers, loaded blocks, and what fills a store."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvtier.core.plan import RestorePlan
from kvtier.core.residency import TierName

__all__ = ["Fill", "FoundBlocks", "LoadedBlock", "OwnTier"]


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A verified block in the arena: copy it before asking for the next."""

    index: int
    """Of its chain."""
    tier: TierName
    payload: memoryview
    good_until_s: float = math.inf
    """On the monotonic clock: a copy that was made by then may be used, without another item."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The answer to a lookup."""

    tiers: tuple[TierName, ...]
    """Of the leading blocks that can be loaded, from the first one asked for on."""
    reason: str
    """Why there are no more."""
    plan: RestorePlan | None = None
    """How many of them should be loaded, and how; without one, all of them."""
    max_offload_tokens: int | None = None
    """How many leading tokens of this request it pays to offer; None: all of them."""
    empty_s: float = 0.0
    """So long there is nothing else of the key space to be found than what the asker stores."""


@dataclass(frozen=True, slots=True)
class OwnTier:
    """What an engine tells of its own tier."""

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int


Fill = Callable[[Sequence[int], Sequence[memoryview]], Generator[None]]
"""Given the indexes of a chain's blocks and a slot for each: yields, in their order, when a slot is
filled. It is closed where nothing more is wanted, and must not write to a slot after that."""
