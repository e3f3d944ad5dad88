"""The tiers of a configuration, opened."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from kvtier.certificate import Certificates
from kvtier.config import Config
from kvtier.config.units import format_size
from kvtier.core.residency import TierName
from kvtier.daemon.policies import ssd_eviction
from kvtier.daemon.tiers.ssd_space import check_space, check_ssd, floor_beside_system
from kvtier.errors import StartError
from kvtier.node.messages.slow_tier import SlowTier, WriteMode
from kvtier.observe.log import Log
from kvtier.secret import Secret
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier
from kvtier.tiers.ssd.store_limits import DAY_S
from kvtier.tiers.ssd.victim import ValuePerByte
from kvtier.tiers.wrapper import TierWrapper

if TYPE_CHECKING:
    from kvtier.tiers.redis import RedisTier

__all__ = [
    "allowance",
    "authorities_of",
    "configured",
    "is_login_alone",
    "load_keys",
    "open_tier",
    "slow_tier",
    "tune_tier",
]

_COOL_DOWN_NS = 1_000_000_000
"""How long a failing tier is left alone: it is back within seconds of its recovery."""

_SPENT_WITHIN_S = 3600.0

_AMPLIFICATION = 4 / 3
"""Bytes that the SSD tier writes for each byte of a new block at most: it moves others."""


_log = Log("kvtier.daemon")


def load_keys(config: Config) -> KeyRing | None:
    """Read the key file, where there is one. Raises StartError."""
    return KeyRing.load(config.seal.key_file) if config.seal.key_file else None


def configured(config: Config) -> tuple[TierName, ...]:
    """Return the tiers below the CPU that a configuration wants, fastest first."""
    wanted = {TierName.SSD: config.ssd.enabled, TierName.REMOTE: bool(config.remote.url)}
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def open_tier(
    config: Config, name: TierName, ring: KeyRing | None, worth: ValuePerByte | None = None
) -> BreakerTier:
    """Open a tier below the CPU; does not connect to a server yet. Raises StartError.

    ``worth`` scores blocks, for eviction policies that use scores.
    """
    tier: Tier
    if name is TierName.SSD:
        tier = _ssd(config, Seal(SealMode(config.ssd.seal), ring, "ssd"), worth)
    else:
        tier = _remote(config, Seal(SealMode(config.remote.seal), ring, "remote"))
    return BreakerTier(tier, cool_down_ns=_COOL_DOWN_NS)


def slow_tier(config: Config, tier: Tier) -> SlowTier:
    """Return what the node must know of a tier."""
    ssd, remote = config.ssd, config.remote
    properties = tier.properties
    if properties.name is TierName.SSD:
        return SlowTier(
            TierName.SSD,
            properties.num_workers,
            ssd.deadline_ns,
            config.cpu.capacity_bytes,  # its queue is bounded by its share of the arena alone
            write=WriteMode(ssd.write),
            # What it is for, a crash and a stop, the tier does not outlive.
            flush_after_ns=ssd.flush_after_ns if ssd.keep else 0,
            is_kept=ssd.keep,
        )
    return SlowTier(
        TierName.REMOTE,
        properties.num_workers,
        remote.deadline_ns,
        remote.in_flight_bytes,
        min_tokens=remote.min_tokens,
        write=WriteMode(remote.write),
    )


def tune_tier(config: Config, tier: Tier) -> None:
    """Have an open tier go by what a reload may change of it."""
    tier = _innermost(tier)
    if isinstance(tier, SsdTier):
        tier.tune(_ssd_options(config))
    elif tier.properties.name is TierName.REMOTE:
        from kvtier.tiers.redis import RedisTier  # its package is there, or it were not open

        if isinstance(tier, RedisTier):
            tier.tune(config.remote.ttl_ns / 1e9, config.remote.max_age_ns / 1e9)
            tier.log_in_by(config.remote.url)


def authorities_of(tier: Tier) -> Secret[Certificates] | None:
    """Return what a tier trusts servers by, where a file of its own says so."""
    tier = _innermost(tier)
    if tier.properties.name is TierName.REMOTE:
        from kvtier.tiers.redis import RedisTier  # its package is there, or it were not open

        if isinstance(tier, RedisTier):
            return tier.authorities
    return None


def is_login_alone(before: Config, after: Config) -> bool:
    """Tell whether two configurations' URLs name the same servers, for another login."""
    try:
        from kvtier.tiers.redis.address import RedisAddress

        address = RedisAddress.parse(before.remote.url)
        return address.is_same_but_login(RedisAddress.parse(after.remote.url))
    except StartError:
        return False


def _innermost(tier: Tier) -> Tier:
    while isinstance(tier, TierWrapper):
        tier = tier.inner
    return tier


def allowance(config: Config, tier: Tier) -> float | None:
    """Return how many bytes a second of blocks the SSD's write budget allows just now.

    The day's even share, and what is left of the budget within an hour: an idle night pays for a
    busy morning, and a morning that spends it all has to make do with the day's share.
    """
    day_bytes = config.ssd.write_budget_bytes
    if not day_bytes:
        return None
    left_bytes = float(tier.usage().detail.get("write_budget_bytes", 0))
    return (day_bytes / DAY_S + left_bytes / _SPENT_WITHIN_S) / _AMPLIFICATION


def _ssd(config: Config, seal: Seal, worth: ValuePerByte | None) -> SsdTier:
    ssd = config.ssd
    if ssd.required:
        check_ssd(config)
    options = replace(
        _ssd_options(config),
        seal=seal,
        worth=worth if ssd_eviction(config) != "lru" else None,
    )
    tier = SsdTier(ssd.directory, ssd.capacity_bytes, ssd.segment_bytes, options)
    _warn_of_room(config)
    return tier


def _warn_of_room(config: Config) -> None:
    """Warn if there is less room than the SSD tier, which is open, is configured for."""
    ssd = config.ssd
    try:
        check_space(config, ssd.directory)
    except StartError as lack:
        _log.warning(
            "the SSD tier has less room than ssd.capacity", problem=lack.problem, remedy=lack.remedy
        )
    with contextlib.suppress(OSError):  # the tier itself reports a volume that fails
        if floor_bytes := floor_beside_system(config, ssd.directory):
            _log.warning(
                "the SSD tier may fill the system's own drive",
                directory=ssd.directory,
                remedy="use another drive, a smaller ssd.capacity, or ssd.free_space_floor = "
                f"{format_size(floor_bytes)}",
            )


def _ssd_options(config: Config) -> SsdOptions:
    ssd = config.ssd
    return SsdOptions(
        direct_io=DirectIO(ssd.direct_io),
        durability=Durability(ssd.durability),
        is_persistent=ssd.keep,
        free_space_floor_bytes=ssd.free_space_floor_bytes,
        free_inodes_floor=ssd.free_inodes_floor,
        write_budget_bytes=ssd.write_budget_bytes,
        max_age_s=_whole_seconds(ssd.max_age_ns),
        num_workers=ssd.io_threads,
    )


def _whole_seconds(time_ns: int) -> int:
    """Round up: an age of half a second is a limit, and 0 is none."""
    return -(-time_ns // 1_000_000_000)


def _remote(config: Config, seal: Seal) -> "RedisTier":
    from kvtier.tiers.redis import RedisOptions, RedisTier

    remote = config.remote
    options = RedisOptions(
        key_prefix=remote.key_prefix,
        ttl_s=remote.ttl_ns / 1e9,
        timeout_s=remote.deadline_ns / 1e9,
        num_workers=remote.io_threads,
        value_bytes=remote.value_bytes,
        max_age_s=remote.max_age_ns / 1e9,
        tls_ca=remote.tls_ca,
        seal=seal,
    )
    try:
        return RedisTier(remote.url, options)
    except StartError as error:
        if error.field != "remote.url" or remote.url_file is None:
            raise
        problem = f"in {remote.url_file}: {error.problem}"
        raise StartError("remote.url_file", problem, error.remedy) from None
