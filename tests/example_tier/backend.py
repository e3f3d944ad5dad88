"""How the daemon opens the example tier."""

from kvtier.core.slow_tier import SlowTier
from kvtier.tiers.backend import OpenContext, TierBackend
from kvtier.tiers.base import Tier

from .settings import DirectoryConfig
from .tier import DirectoryTier


class DirectoryBackend(TierBackend[DirectoryConfig]):
    """Opens a ``DirectoryTier``; there is nothing to tune, seal or check."""

    def open(self, settings: DirectoryConfig, context: OpenContext) -> DirectoryTier:
        return DirectoryTier(settings.directory, settings.capacity_bytes, context.name)

    def placement(self, settings: DirectoryConfig, tier: Tier, arena_bytes: int) -> SlowTier:
        properties = tier.properties
        return SlowTier(
            properties.name,
            properties.num_workers,
            settings.deadline_ns,
            queue_bytes_max=arena_bytes,
            write=settings.write_mode,
        )


BACKEND = DirectoryBackend()
