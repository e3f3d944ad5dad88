"""Opens the configured tiers, at the start or later, and applies the configuration to open ones.

A tier is opened and first accessed on a thread, and its blocks are listed in small batches, so that
requests are not delayed. The node uses the tier once it knows all of its blocks. An attempt
that is abandoned before that leaves nothing behind.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from kvtier.certificate import Certificates
from kvtier.config import Config
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.limits import ROWS_TOLD_AT_ONCE
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.core.slow_tier import SlowTier
from kvtier.errors import LockHeld, StartError, TierError
from kvtier.node.messages import events as ev
from kvtier.runtime.driver import Driver
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.secret import Secret
from kvtier.tiers.backend import BlockScores, OpenContext, backend_of
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.seal import KeyRing
from kvtier.tiers.wrapper import TierWrapper

__all__ = [
    "OpenTier",
    "Opening",
    "authorities_of",
    "begin_opening",
    "check_tier",
    "configured",
    "devices_of",
    "is_same_place",
    "load_keys",
    "open_at_start",
    "open_tier",
    "opened",
    "place_key",
    "placement",
    "report_blocks",
    "tune_tier",
    "write_allowance",
]

_TOUCH_LIMIT_NS = 2_000_000_000
"""Time for the first access to a device; a connection over TLS takes a tenth of that."""

_START_WAIT_S = 10.0
"""How long the start waits for tiers that are not required. A drive that does not answer must not
keep the others from serving; a store with many files is attached once it has been read."""

OpenTier = Callable[[Config, TierName], BreakerTier]
"""Opens one tier; may block, and raises StartError."""

Opening = asyncio.Future[BreakerTier]
"""A tier that is being opened on a thread."""


def load_keys(config: Config) -> KeyRing | None:
    """Read the key file, if there is one. Raises StartError."""
    return KeyRing.load(config.seal.key_file) if config.seal.key_file else None


def configured(config: Config) -> tuple[TierName, ...]:
    """Return the slow tiers that are enabled, fastest first."""
    return tuple(name for name in SLOW_TIERS if config.tiers[name].is_enabled)


def place_key(config: Config, name: TierName) -> str:
    """Return the key that says where a tier's blocks are."""
    return f"{name}.{config.tiers[name].place_key}"


def open_tier(
    config: Config, name: TierName, ring: KeyRing | None, scores: BlockScores | None = None
) -> BreakerTier:
    """Open a slow tier; does not connect to a server yet. Raises StartError.

    ``scores`` are those of the eviction policy; only tiers with a ranked policy use them.
    """
    section = config.tiers[name]
    policy = EVICTION_POLICIES[section.eviction_policy(config.policy.eviction)]
    context = OpenContext(name, ring, scores if policy.is_ranked else None)
    return BreakerTier(backend_of(name).open(section, context))


def check_tier(config: Config, name: TierName) -> None:
    """Check that a tier can be opened; raises StartError. May create directories."""
    backend_of(name).check_start(config.tiers[name])


def placement(config: Config, tier: Tier) -> SlowTier:
    """Return how the node uses an open tier."""
    name = tier.properties.name
    return backend_of(name).placement(config.tiers[name], tier, config.cpu.capacity_bytes)


def tune_tier(config: Config, tier: Tier) -> None:
    """Apply the settings that a reload may change to an open tier."""
    name = tier.properties.name
    backend_of(name).tune(_innermost(tier), config.tiers[name])


def authorities_of(tier: Tier) -> Secret[Certificates] | None:
    """Return the certificate authorities that a tier trusts, if they are in a file of their own."""
    return backend_of(tier.properties.name).authorities(_innermost(tier))


def write_allowance(config: Config, tier: Tier) -> float | None:
    """Return a tier's current write budget in bytes per second; None: no limit."""
    name = tier.properties.name
    return backend_of(name).write_allowance(config.tiers[name], tier)


def devices_of(config: Config, names: Collection[TierName]) -> dict[TierName, str]:
    """Return a name for the device of each given tier; blocks while a device does not answer."""
    return {name: backend_of(name).device(config.tiers[name]) for name in names}


def is_same_place(name: TierName, before: Config, after: Config) -> bool:
    """Return whether an open tier can take over another configuration's place."""
    try:
        return backend_of(name).is_same_place(before.tiers[name], after.tiers[name])
    except StartError:  # it needs a package that is missing
        return False


async def open_at_start(
    config: Config, open_tier: OpenTier
) -> tuple[dict[TierName, BreakerTier], dict[TierName, Opening]]:
    """Open the configured tiers; returns those that are open, and those still being opened.

    A local tier that is not required may be opened later if it takes long, or cannot be opened for
    a reason that may go away. Any other fault raises StartError, and no tier stays open.
    """
    openings = {
        name: run_in_thread(partial(open_tier, config, name), f"kvtier-{name}-open")
        for name in configured(config)
    }
    try:
        if openings:
            is_required = any(config.tiers[name].is_required for name in openings)
            wait_s = None if is_required else _START_WAIT_S
            await asyncio.wait(openings.values(), timeout=wait_s)
        tiers = {}
        for name, opening in openings.items():
            if opening.done() and not _is_temporary(config, name, opening.exception()):
                tiers[name] = opening.result()
    except BaseException:
        for opening in openings.values():
            opening.add_done_callback(_close_late)
        raise
    return tiers, {name: each for name, each in openings.items() if name not in tiers}


def begin_opening(config: Config, name: TierName, open_tier: OpenTier) -> Opening:
    """Begin to open a tier and to access its device, on a thread."""
    return run_in_thread(partial(_open, config, name, open_tier), f"kvtier-{name}-open")


async def opened(opening: Opening) -> BreakerTier:
    """Wait until a tier is open, however long that takes. Raises StartError.

    If this is cancelled, the tier is closed as soon as it is open.
    """
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_late)
        raise


async def report_blocks(driver: Driver, tier: Tier, on_batch: Callable[[int], None]) -> None:
    """Report all blocks of a tier to the node, and after each batch its size to ``on_batch``.

    Raises TierError if they cannot be read.
    """
    name, batches = tier.properties.name, tier.headers()
    while True:
        headers = await run_in_thread(partial(next, batches, None), f"kvtier-{name}-open")
        if headers is None:
            return
        for first in range(0, len(headers), ROWS_TOLD_AT_ONCE):
            some = headers[first : first + ROWS_TOLD_AT_ONCE]
            driver.post(ev.BlocksRecovered(name, some))
            on_batch(len(some))
            await asyncio.sleep(0)


def _innermost(tier: Tier) -> Tier:
    while isinstance(tier, TierWrapper):
        tier = tier.inner
    return tier


def _is_temporary(config: Config, name: TierName, error: BaseException | None) -> bool:
    """Return whether a tier that could not be opened may become usable while the daemon runs.

    A store that another process holds is a configuration error, not a temporary fault: if it were
    held by an earlier daemon that is still stopping, the lock of the socket would already refuse.
    """
    return (
        not name.is_shared
        and not config.tiers[name].is_required
        and isinstance(error, StartError)
        and not isinstance(error, LockHeld)
        and error.field == place_key(config, name)
    )


def _open(config: Config, name: TierName, open_tier: OpenTier) -> BreakerTier:
    tier = open_tier(config, name)
    try:
        tier.health_check(time.monotonic_ns() + _TOUCH_LIMIT_NS)
    except BaseException as error:
        tier.close()
        if isinstance(error, TierError):
            remedy = "repair it, or configure another one"
            raise StartError(place_key(config, name), str(error), remedy) from error
        raise
    return tier


def _close_late(opening: "asyncio.Future[BreakerTier]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="kvtier-close", daemon=True).start()
