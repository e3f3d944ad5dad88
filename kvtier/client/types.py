"""The data types and callbacks that an engine exchanges with its client."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvtier.core.plan import RestorePlan
from kvtier.core.residency import TierName
from kvtier.core.residency_change import ResidencyChange

__all__ = [
    "ClientDeadlines",
    "Fill",
    "FoundBlocks",
    "LoadedBlock",
    "OnChanges",
    "OwnTier",
    "plan_timeout_s",
]

_WAIT_SHARE = 1.2
_WAIT_MARGIN_S = 0.05
"""The daemon ends a planned load itself. In case it does not, the client gives up after the planned
wait times ``_WAIT_SHARE`` plus this; with less, a busy machine would look like a slow daemon."""


@dataclass(frozen=True, slots=True)
class ClientDeadlines:
    """How long an engine waits for the daemon."""

    lookup_s: float = 0.25
    load_s: float = 5.0
    store_s: float = 5.0
    reconnect_s: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A verified block in the arena. Copy it before asking for the next one."""

    index: int
    """The block's position in its chain."""
    tier: TierName
    payload: memoryview
    good_until_s: float = math.inf
    """A copy finished by this time on the monotonic clock may be used at once."""


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """The answer to a lookup."""

    tiers: tuple[TierName, ...]
    """The tier of each leading block that can be loaded, starting at the first requested one."""
    reason: str
    """Why no more blocks were found."""
    plan: RestorePlan | None = None
    """How many of them to load, and how; None: load all of them."""
    max_offload_tokens: int | None = None
    """How many leading tokens of this request are worth storing; None: all of them."""
    empty_s: float = 0.0
    """For this many seconds the key space holds only what this client itself stores."""

    @property
    def num_planned(self) -> int:
        """Return how many of the found blocks to load."""
        return len(self.tiers) if self.plan is None else min(len(self.tiers), self.plan.num_blocks)

    @property
    def decision(self) -> int:
        """Return the number of the plan; 0 without one."""
        return self.plan.decision if self.plan else 0

    def load_timeout_s(self, deadline_s: float) -> float:
        """Return how long to wait for the load, at most ``deadline_s``."""
        return plan_timeout_s(self.plan.wait_ns if self.plan else 0, deadline_s)


@dataclass(frozen=True, slots=True)
class OwnTier:
    """An engine's report about its own tier."""

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int


Fill = Callable[[Sequence[int], Sequence[memoryview]], Generator[None]]
"""Takes the chain indexes of blocks, and an arena slot for each. Yields once per slot, in order,
when that slot is filled. It is closed if no more blocks are wanted, and must not write to slots
after that."""

OnChanges = Callable[[Sequence[ResidencyChange]], None]
"""Called with changes of residency in order. Each session begins and ends with ``RESYNC``."""


def plan_timeout_s(wait_ns: int, deadline_s: float) -> float:
    """Return how long to wait for a load whose plan allows ``wait_ns``; 0: the whole deadline."""
    return min(deadline_s, _WAIT_SHARE * wait_ns / 1e9 + _WAIT_MARGIN_S) if wait_ns else deadline_s
