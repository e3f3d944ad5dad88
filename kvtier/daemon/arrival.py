"""A tier that comes: checked as at the start, opened, touched, and read for what it holds.

All of it on threads and a little at a time, so that requests notice nothing. The node uses the tier
once it knows all that is in it; until then whoever gives up leaves nothing behind.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from kvtier.config import Config
from kvtier.core.limits import ROWS_TOLD_AT_ONCE
from kvtier.core.residency import TierName
from kvtier.daemon.room import check_ssd
from kvtier.daemon.yardstick import without_probes
from kvtier.errors import StartError, TierError
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.node.workers import in_thread
from kvtier.tiers.base import Tier
from kvtier.tiers.wrap.breaker import BreakerTier

__all__ = ["PLACES", "OpenTier", "opened", "place_of", "tell_blocks"]

PLACES: Mapping[TierName, str] = {
    TierName.SSD: "ssd.directory",
    TierName.REMOTE: "remote.url",
}
"""The key that says where a tier's medium is."""

_TOUCH_LIMIT_NS = 2_000_000_000
"""For the first touch of a medium; a connection over TLS takes a tenth of that."""

OpenTier = Callable[[Config, TierName], BreakerTier]
"""Opens one tier; may block, and raises StartError."""


def place_of(config: Config, name: TierName) -> str:
    """Return where a tier's medium is."""
    return str(config.ssd.directory if name is TierName.SSD else config.remote.url)


async def opened(config: Config, name: TierName, open_tier: OpenTier) -> BreakerTier:
    """Open a tier, however long it takes. Raises StartError.

    Where this is cancelled, it is closed as soon as it is open.
    """
    opening = in_thread(partial(_open, config, name, open_tier), f"kvtier-{name}-open")
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
        headers = await in_thread(partial(next, batches, None), f"kvtier-{name}-open")
        if headers is None:
            return
        headers = without_probes(headers)
        for first in range(0, len(headers), ROWS_TOLD_AT_ONCE):
            some = headers[first : first + ROWS_TOLD_AT_ONCE]
            driver.post(ev.Recovered(name, some))
            on_told(len(some))
            await asyncio.sleep(0)


def _open(config: Config, name: TierName, open_tier: OpenTier) -> BreakerTier:
    if name is TierName.SSD:
        check_ssd(config)
    tier = open_tier(config, name)
    try:
        tier.probe(time.monotonic_ns() + _TOUCH_LIMIT_NS)
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
