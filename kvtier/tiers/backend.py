"""The interface of a tier's package, and how to find its implementation.

``kvtier.core.tier_registry`` lists the packages and says what each must contain.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

from kvtier.certificate import Certificates
from kvtier.config.tiers import TierSection
from kvtier.core.identity import BlockHash
from kvtier.core.slow_tier import SlowTier
from kvtier.core.tier_registry import TIERS, TierName
from kvtier.secret import Secret
from kvtier.tiers.base import Tier
from kvtier.tiers.finding import TierCheck
from kvtier.tiers.seal import KeyRing

__all__ = ["BlockScores", "OpenContext", "TierBackend", "backend_of"]

_DIGITS = 12

BlockScores = Callable[[Sequence[BlockHash]], Sequence[float]]
"""Scores blocks: the higher, the longer each should be kept."""

S = TypeVar("S", bound=TierSection)


@dataclass(frozen=True, slots=True)
class OpenContext:
    """Shared objects that a tier may use besides its own settings."""

    name: TierName
    ring: KeyRing | None = None
    """Keys to seal blocks with, if there are any."""
    scores: BlockScores | None = None
    """Scores of the eviction policy, if it has any."""


class TierBackend(ABC, Generic[S]):
    """Opens, configures and checks a tier. Override at least ``open`` and ``placement``.

    ``S`` is the class of its settings. All methods may be called from any thread.
    """

    @abstractmethod
    def open(self, settings: S, context: OpenContext) -> Tier:
        """Open the tier. May block, but does not connect to a server. Raises StartError."""

    @abstractmethod
    def placement(self, settings: S, tier: Tier, arena_bytes: int) -> SlowTier:
        """Return how the node uses the open tier: deadlines, limits and when it writes."""

    def tune(self, tier: Tier, settings: S) -> None:
        """Apply the settings that a reload may change to the open tier."""

    def device(self, settings: S) -> str:
        """Return a name for the device, so that its measurements are not used for another one.

        May block while the device does not answer.
        """
        return self.digest(settings.place)

    @staticmethod
    def digest(place: str) -> str:
        """Return a short name for a place that may be confidential."""
        return hashlib.sha256(place.encode()).hexdigest()[:_DIGITS]

    def is_same_place(self, before: S, after: S) -> bool:
        """Return whether ``tune`` can switch the open tier from one place to the other."""
        return before.place == after.place

    def check_start(self, settings: S) -> None:
        """Check that the tier can be opened; raises StartError. May create directories."""

    def authorities(self, tier: Tier) -> Secret[Certificates] | None:  # overridden by some tiers
        """Return the certificates by which the open tier trusts servers, if from a file."""
        return None

    def write_allowance(self, settings: S, tier: Tier) -> float | None:  # as above
        """Return how many bytes of blocks per second may be written now; None: no limit."""
        return None

    def checks(self, settings: S) -> Sequence[TierCheck]:
        """Return the tier's checks for ``kvtier doctor``, in the order of the report."""
        return ()


@cache
def backend_of(name: TierName) -> TierBackend[Any]:
    """Return the backend of a slow tier. Raises StartError if it lacks a package."""
    backend: TierBackend[Any] = import_module(f"{TIERS[name].package}.backend").BACKEND
    return backend
