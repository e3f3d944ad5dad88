"""The registry of eviction policies for the CPU tier.

To add a policy, write its class in a module of this package (the ``Eviction`` protocol is its
contract) and add a row here. The values and the help text of ``policy.eviction`` and
``ssd.eviction``, the simulator's choices and ``kvtier replay --policy`` follow from the rows.
``tests/unit/test_eviction_registry.py`` adds an example.
"""

import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands read this table with the configuration, and need no numpy for it
    from kvtier.core.eviction.base import Eviction
    from kvtier.core.reuse.history import History

__all__ = ["EVICTION_POLICIES", "EvictionPolicy", "own_order_of", "policy_help"]


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """How a policy is created, and its properties."""

    create: "Callable[[History], Eviction]"
    summary: str
    """What it evicts first, for the help text: a phrase."""
    is_ranked: bool = False
    """Whether it scores blocks by predicted reuse, so that slower tiers can use its order, too."""
    is_weighed: bool = False
    """Whether the scores count the seconds that a hit saves."""


def _imported(name: str) -> "Callable[[History], Eviction]":
    """Return a constructor that imports ``module:Class`` of this package when it is called."""

    def create(history: "History") -> "Eviction":
        eviction: Eviction = pkgutil.resolve_name(f"kvtier.core.eviction.{name}")(history)
        return eviction

    return create


EVICTION_POLICIES: Mapping[str, EvictionPolicy] = {
    "rd-sec": EvictionPolicy(
        _imported("run_density:RunDensity"),
        "least predicted reuse for the time they would be held, learned online, and weighed by the "
        "seconds that a hit saves",
        is_ranked=True,
        is_weighed=True,
    ),
    "rd": EvictionPolicy(
        _imported("run_density:RunDensity"),
        "as rd-sec, all hits counting the same",
        is_ranked=True,
    ),
    "credit-lru": EvictionPolicy(
        _imported("run_density:CreditLru"),
        "least recently used, blocks that were used before counting as used later",
    ),
    "lru": EvictionPolicy(_imported("leaf_lru:LeafLru"), "least recently used"),
    "s3-fifo": EvictionPolicy(
        _imported("s3_fifo:S3Fifo"), "oldest first, blocks that were used once before all others"
    ),
}
"""Policies by their names in the configuration; the first one is the default."""


def policy_help(names: Collection[str] = EVICTION_POLICIES) -> str:
    """Return the help text for a choice of policies: a sentence."""
    return "; ".join(f"{name}: {EVICTION_POLICIES[name].summary}" for name in names) + "."


def own_order_of(name: str) -> str:
    """Return the policy of a slower tier if the CPU tier's policy is ``name``.

    It is the same policy if it is ranked; otherwise ``lru``, the order in which the tier was
    written.
    """
    return name if EVICTION_POLICIES[name].is_ranked else "lru"
