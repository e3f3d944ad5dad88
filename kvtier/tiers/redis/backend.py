"""Opens and tunes the remote tier for the daemon and the tools.

Importing this module raises StartError without the package redis.
"""

import importlib.util
from collections.abc import Sequence

from kvtier.certificate import Certificates
from kvtier.core.slow_tier import SlowTier
from kvtier.errors import StartError
from kvtier.secret import Secret
from kvtier.tiers.backend import OpenContext, TierBackend
from kvtier.tiers.base import Tier
from kvtier.tiers.finding import TierCheck
from kvtier.tiers.redis.settings import RedisConfig
from kvtier.tiers.seal import Seal, SealMode

if importlib.util.find_spec("redis") is None:
    raise StartError("remote.url", "needs the redis package", "pip install 'kvtier[redis]'")

from kvtier.tiers.redis.address import RedisAddress
from kvtier.tiers.redis.doctor import redis_checks
from kvtier.tiers.redis.tier import RedisOptions, RedisTier

__all__ = ["BACKEND", "RedisBackend"]


class RedisBackend(TierBackend[RedisConfig]):
    """Opens and tunes the ``RedisTier``."""

    def open(self, settings: RedisConfig, context: OpenContext) -> RedisTier:
        """Return the tier; it connects when it is first used. Raises StartError."""
        options = RedisOptions(
            key_prefix=settings.key_prefix,
            ttl_s=settings.ttl_ns / 1e9,
            timeout_s=settings.deadline_ns / 1e9,
            num_workers=settings.io_threads,
            value_bytes=settings.value_bytes,
            max_age_s=settings.max_age_ns / 1e9,
            tls_ca=settings.tls_ca,
            seal=Seal(SealMode(settings.seal), context.ring, context.name),
        )
        try:
            return RedisTier(settings.url, options)
        except StartError as error:
            if error.field != "remote.url" or settings.url_file is None:
                raise
            problem = f"in {settings.url_file}: {error.problem}"
            raise StartError("remote.url_file", problem, error.remedy) from None

    def placement(self, settings: RedisConfig, tier: Tier, arena_bytes: int) -> SlowTier:
        """Return how the node uses the tier."""
        return SlowTier(
            tier.properties.name,
            tier.properties.num_workers,
            settings.deadline_ns,
            settings.in_flight_bytes,
            min_tokens=settings.min_tokens,
            write=settings.write_mode,
        )

    def tune(self, tier: Tier, settings: RedisConfig) -> None:
        """Apply the settings that a reload may change, including the login."""
        if isinstance(tier, RedisTier):
            tier.tune(settings.ttl_ns / 1e9, settings.max_age_ns / 1e9)
            tier.change_login(settings.url)

    def device(self, settings: RedisConfig) -> str:
        """Return a digest of the servers; a different login is still the same server."""
        return self.digest(settings.url.rpartition("@")[2])

    def is_same_place(self, before: RedisConfig, after: RedisConfig) -> bool:
        """Return whether both URLs name the same servers, with any login."""
        try:
            address = RedisAddress.parse(before.url)
            return address.differs_only_in_login(RedisAddress.parse(after.url))
        except StartError:
            return False

    def checks(self, settings: RedisConfig) -> Sequence[TierCheck]:
        """Return the check of the servers."""
        return redis_checks(settings)

    def authorities(self, tier: Tier) -> Secret[Certificates] | None:
        """Return the certificates of ``remote.tls_ca``."""
        return tier.authorities if isinstance(tier, RedisTier) else None


BACKEND = RedisBackend()
"""See ``kvtier.core.tier_registry``."""
