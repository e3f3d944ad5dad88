"""Opens and tunes the SSD tier for the daemon and the tools."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

import psutil

from kvtier.config.units import format_size
from kvtier.core.slow_tier import SlowTier
from kvtier.errors import StartError
from kvtier.observe.log import Log
from kvtier.tiers.backend import OpenContext, TierBackend
from kvtier.tiers.base import Tier
from kvtier.tiers.finding import TierCheck
from kvtier.tiers.seal import Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.doctor import ssd_checks
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.settings import SsdConfig
from kvtier.tiers.ssd.space import check_space, check_ssd, floor_beside_system
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.store_limits import DAY_S

__all__ = ["BACKEND", "SsdBackend"]

_log = Log("kvtier.daemon")

_SPENT_WITHIN_S = 3600.0

_AMPLIFICATION = 4 / 3
"""Most bytes that the tier writes per byte of a new block, because it relocates others."""


class SsdBackend(TierBackend[SsdConfig]):
    """Opens and tunes the ``SsdTier``."""

    def open(self, settings: SsdConfig, context: OpenContext) -> SsdTier:
        """Open the store, and warn if its volume has too little space. Raises StartError."""
        if settings.required:
            check_ssd(settings)
        options = replace(
            _options(settings),
            seal=Seal(SealMode(settings.seal), context.ring, context.name),
            value_per_byte=context.scores,
        )
        tier = SsdTier(settings.directory, settings.capacity_bytes, settings.segment_bytes, options)
        _warn_of_space(settings)
        return tier

    def placement(self, settings: SsdConfig, tier: Tier, arena_bytes: int) -> SlowTier:
        """Return how the node uses the tier; its share of the arena alone bounds its queue."""
        return SlowTier(
            tier.properties.name,
            tier.properties.num_workers,
            settings.deadline_ns,
            arena_bytes,
            write=settings.write_mode,
            # Flushing saves blocks from a crash or a stop; a tier that is not kept loses them.
            flush_after_ns=settings.flush_after_ns if settings.keep else 0,
            is_kept=settings.keep,
        )

    def tune(self, tier: Tier, settings: SsdConfig) -> None:
        """Apply the settings that a reload may change."""
        if isinstance(tier, SsdTier):
            tier.tune(_options(settings))

    def device(self, settings: SsdConfig) -> str:
        """Return device, file system and size of the volume that the directory is on."""
        directory = os.path.realpath(settings.directory)
        around = [
            part
            for part in psutil.disk_partitions(all=True)
            if os.path.commonpath([part.mountpoint, directory]) == part.mountpoint
        ]
        found = max(around, key=lambda part: len(part.mountpoint), default=None)
        name = f"{found.device} {found.fstype}" if found else "unknown"
        try:
            status = os.statvfs(directory)
        except OSError:  # removed a moment ago, or the tier is a fake
            return f"{name}, gone"
        return f"{name}, {status.f_blocks * status.f_frsize / 2**30:.0f} GiB"

    def checks(self, settings: SsdConfig) -> Sequence[TierCheck]:
        """Return the checks of the directory, its volume and its drive."""
        return ssd_checks(settings)

    def check_start(self, settings: SsdConfig) -> None:
        """Check that the directory can be written and that the capacity fits."""
        check_ssd(settings)

    def write_allowance(self, settings: SsdConfig, tier: Tier) -> float | None:
        """Return how many bytes of blocks per second the write budget allows now.

        That is the day's even share, plus the unused budget spread over an hour: an idle night pays
        for a busy morning, and once the budget is spent only the day's share is left.
        """
        day_bytes = settings.write_budget_bytes
        if not day_bytes:
            return None
        left_bytes = float(tier.usage().detail.get("write_budget_bytes", 0))
        return (day_bytes / DAY_S + left_bytes / _SPENT_WITHIN_S) / _AMPLIFICATION


def _options(settings: SsdConfig) -> SsdOptions:
    return SsdOptions(
        direct_io=DirectIO(settings.direct_io),
        durability=Durability(settings.durability),
        is_persistent=settings.keep,
        free_space_floor_bytes=settings.free_space_floor_bytes,
        free_inodes_floor=settings.free_inodes_floor,
        write_budget_bytes=settings.write_budget_bytes,
        max_age_s=-(-settings.max_age_ns // 1_000_000_000),  # rounded up, because 0 is no limit
        num_workers=settings.io_threads,
    )


def _warn_of_space(settings: SsdConfig) -> None:
    """Warn if the volume of the open tier has less free space than the tier may take."""
    try:
        check_space(settings, settings.directory)
    except StartError as lack:
        _log.warning(
            "the SSD tier has less space than ssd.capacity",
            problem=lack.problem,
            remedy=lack.remedy,
        )
    with contextlib.suppress(OSError):  # the tier itself reports a volume that fails
        if floor_bytes := floor_beside_system(settings, settings.directory):
            _log.warning(
                "the SSD tier may fill the system's own drive",
                directory=settings.directory,
                remedy="use another drive, a smaller ssd.capacity, or ssd.free_space_floor = "
                f"{format_size(floor_bytes)}",
            )


BACKEND = SsdBackend()
"""See ``kvtier.core.tier_registry``."""
