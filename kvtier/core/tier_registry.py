"""The registry of tiers: the only file that lists them.

To add a tier
-------------
1. Write a package with two modules. ``settings`` defines ``SETTINGS``, a subclass of
   ``kvtier.config.tiers.TierSection``: the tier's section of the configuration file. It
   imports nothing of the tier itself, because every process reads the configuration. ``backend``
   defines ``BACKEND``, a ``kvtier.tiers.backend.TierBackend``: it opens the tier, applies a reload
   to it, tells the node how to use it, identifies its device and checks it for ``kvtier doctor``.
   It is imported only where the tier is configured, so it may need packages that others lack.
2. Add a member to ``TierName`` and a row to ``TIERS`` here: the order is that of their speed, and
   the row has the properties that every layer may ask for.
3. Add its number to ``Tier`` in ``proto/kvtier/v1/engine.proto``, so that no other tier takes it.

Metric labels, routes, the status document, the CLI's choices and the index follow from here. Run
the tier contract suite (``kvtier.testing.tier_contract``) over it; ``tests/example_tier`` is an
example.

Rules
-----
* Shared code asks a tier for its properties (``name.is_shared``), never for its name. Only the GPU
  and the CPU tier are named: they are the two ends of every load and store.
* Names and wire numbers never change: they are in stored blocks' seals, metrics and messages.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "LOWER_TIERS",
    "SLOW_TIERS",
    "STORE_TIER",
    "TIERS",
    "TierName",
    "TierSpec",
    "TransferPrior",
]


class TierName(StrEnum):
    """All tiers, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    SSD = "ssd"
    REMOTE = "remote"

    @property
    def is_shared(self) -> bool:
        """Whether other nodes read and write the tier, so that only it knows what it holds."""
        return TIERS[self].is_shared

    @property
    def is_persistent(self) -> bool:
        """Whether its blocks outlive the daemon."""
        return TIERS[self].is_persistent


@dataclass(frozen=True, slots=True)
class TransferPrior:
    """Assumed speed of reads from a tier until transfers have been measured."""

    start_s: float
    block_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TierSpec:
    """Properties of a tier that every layer may ask for."""

    wire_number: int
    """Its value in the enum ``Tier`` of ``engine.proto``."""
    prior: TransferPrior | None = None
    """None for the GPU tier: engines read it in place."""
    is_shared: bool = False
    is_persistent: bool = False
    package: str = ""
    """Python package with its ``settings`` and ``backend``; empty for the GPU and the CPU tier."""


TIERS: Mapping[TierName, TierSpec] = {
    TierName.GPU: TierSpec(wire_number=1),
    TierName.CPU: TierSpec(
        wire_number=2,
        # A call to the daemon and a memory copy. Rather too fast: the first restores correct that,
        # and blocks that only come from the arena would not be measured otherwise.
        prior=TransferPrior(start_s=1e-3, block_s=1e-5, bytes_per_s=6e9),
    ),
    TierName.SSD: TierSpec(
        wire_number=3,
        prior=TransferPrior(2e-4, 5e-5, 4e8),  # a cheap drive, or a share of a good one
        is_persistent=True,
        package="kvtier.tiers.ssd",
    ),
    TierName.REMOTE: TierSpec(
        wire_number=4,
        prior=TransferPrior(1e-3, 2e-4, 1e8),  # gigabit Ethernet
        is_shared=True,
        is_persistent=True,
        package="kvtier.tiers.redis",
    ),
}
"""All tiers; the order is that of ``TierName``."""

LOWER_TIERS: tuple[TierName, ...] = tuple(name for name in TierName if name is not TierName.GPU)
"""The tiers of the daemon, in the order in which a load prefers them."""

SLOW_TIERS: tuple[TierName, ...] = tuple(name for name in TierName if TIERS[name].package)
"""Tiers whose calls block, and that operators attach and detach while the daemon runs."""

STORE_TIER = next(name for name in SLOW_TIERS if name.is_persistent and not name.is_shared)
"""The fastest local tier whose blocks outlive the daemon: it is scrubbed, and the learned state is
saved beside its blocks."""
