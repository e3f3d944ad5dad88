"""Opening a tier, at the start or later: it is opened, touched, and its blocks are listed.

All of this happens on threads, and blocks are listed in small batches, so that requests are not
delayed. The node uses the tier once it knows all of its blocks. An attempt that is given up before
that leaves nothing behind.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.config import Config
from kvtier.core.limits import ROWS_TOLD_AT_ONCE
from kvtier.core.residency import TierName
from kvtier.daemon.tiers.opening import configured
from kvtier.errors import LockHeld, StartError, TierError
from kvtier.node.messages import events as ev
from kvtier.runtime.driver import Driver
from kvtier.runtime.worker_pool import run_in_thread
from kvtier.tiers.base import Tier
from kvtier.tiers.breaker import BreakerTier

__all__ = [
    "PLACES",
    "OpenTier",
    "Opening",
    "begin_opening",
    "open_at_start",
    "opened",
    "place_of",
    "tell_blocks",
]

PLACES: Mapping[TierName, str] = {
    TierName.SSD: "ssd.directory",
    TierName.REMOTE: "remote.url",
}
"""The key that says where a tier's medium is."""

_TOUCH_LIMIT_NS = 2_000_000_000
"""Time for the first touch of a medium; a connection over TLS takes a tenth of that."""

_START_WAIT_S = 10.0
"""How long the start waits for the SSD tier. A drive that does not answer must not keep the other
tiers from serving; a store with very many files is attached once it has been read."""

OpenTier = Callable[[Config, TierName], BreakerTier]
"""Opens one tier; may block, and raises StartError."""

Opening = asyncio.Future[BreakerTier]
"""A tier that is being opened on a thread."""


def place_of(config: Config, name: TierName) -> str:
    """Return where a tier's medium is."""
    return str(config.ssd.directory if name is TierName.SSD else config.remote.url)


async def open_at_start(
    config: Config, open_tier: OpenTier
) -> tuple[dict[TierName, BreakerTier], dict[TierName, Opening]]:
    """Open the configured tiers; returns those that are open, and those still being opened.

    Unless it is required, the SSD tier may be opened later: if it takes long, or cannot be opened
    for a reason that may go away. Any other fault raises StartError, and no tier stays open.
    """
    openings = {
        name: run_in_thread(partial(open_tier, config, name), f"kvtier-{name}-open")
        for name in configured(config)
    }
    try:
        if openings:
            wait_s = None if config.ssd.required else _START_WAIT_S
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
    """Begin to open a tier and to touch its medium, on a thread."""
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


async def tell_blocks(driver: Driver, tier: Tier, on_told: Callable[[int], None]) -> None:
    """Tell the node what a tier holds; ``on_told`` how many blocks it was each time.

    Raises TierError where that cannot be read.
    """
    name, batches = tier.properties.name, tier.headers()
    while True:
        headers = await run_in_thread(partial(next, batches, None), f"kvtier-{name}-open")
        if headers is None:
            return
        for first in range(0, len(headers), ROWS_TOLD_AT_ONCE):
            some = headers[first : first + ROWS_TOLD_AT_ONCE]
            driver.post(ev.BlocksRecovered(name, some))
            on_told(len(some))
            await asyncio.sleep(0)


def _is_temporary(config: Config, name: TierName, error: BaseException | None) -> bool:
    """Tell whether a tier that could not be opened may become usable while the daemon runs.

    A store that another process holds is a configuration error, not a temporary fault: if it were
    held by an earlier daemon that is still stopping, the lock of the socket would already refuse.
    """
    return (
        name is TierName.SSD
        and not config.ssd.required
        and isinstance(error, StartError)
        and not isinstance(error, LockHeld)
        and error.field == PLACES[name]
    )


def _open(config: Config, name: TierName, open_tier: OpenTier) -> BreakerTier:
    tier = open_tier(config, name)
    try:
        tier.health_check(time.monotonic_ns() + _TOUCH_LIMIT_NS)
    except BaseException as error:
        tier.close()
        if isinstance(error, TierError):
            remedy = "put it right, or name another one"
            raise StartError(PLACES[name], str(error), remedy) from error
        raise
    return tier


def _close_late(opening: "asyncio.Future[BreakerTier]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        threading.Thread(target=opening.result().close, name="kvtier-close", daemon=True).start()
