"""Verification: checks with a shared tier that it still holds the blocks that the index has for it.

A server loses blocks without notice: it restarts, is flushed, evicts keys, or keys expire. So each
step asks the tier for a few of the blocks that count as held. If many of them are gone, and after a
restart or a failover, all blocks of the tier become unverified. An unverified block is not served,
and is written again if it is stored, until the tier confirms it. Unverified blocks are checked in
the background, at a bounded rate.
"""

import asyncio
import contextlib

import numpy as np

from kvtier.core.identity import split_hashes
from kvtier.core.limits import FEED_ROWS_AT_ONCE
from kvtier.core.residency import Residency, TierName
from kvtier.errors import TierError
from kvtier.node.messages import events as ev
from kvtier.observe.log import Log
from kvtier.runtime.driver import Driver
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.tiers.base import HealthState

__all__ = ["Verifier"]

_log = Log("kvtier.node")

_SAMPLE_BLOCKS = 64
"""Blocks per step while none are unverified: 100,000 blocks take half an hour."""

_LOST_MIN = 8
_LOST_SHARE = 0.25
"""How many blocks of a sample, and what share of it, must be gone to make all blocks unverified."""

_BATCH_BLOCKS = 512
_PAUSE_S = 0.1
"""Pause between batches: 5,000 blocks a second, because many nodes may come back to a server at the
same time."""

_LIMIT_NS = 1_000_000_000
"""Time for one answer. Health probes wait for the same thread."""


class Verifier:
    """Verifies the blocks that ``driver``'s node has for one shared tier; one step at a time."""

    def __init__(self, driver: Driver, tier: TierName) -> None:
        self._driver = driver
        self._index = driver.node.cache.index
        self._tier = tier
        self._next_row = 0

    async def step(self) -> None:
        """Verify all unverified blocks, or a sample if there are none, unless the tier is out."""
        executor = self._driver.executors.get(self._tier)
        if executor is None or executor.health().state is HealthState.OUT:
            return
        with contextlib.suppress(TierError):  # the tier's health shows it; the next step retries
            if self._index.num_in(self._tier, Residency.UNVERIFIED):
                await self._verify(executor)
            else:
                await self._sample(executor)

    async def _verify(self, executor: TierExecutor) -> None:
        self._next_row, num_before = 0, self._num_blocks()
        while True:
            hashes = self._take(Residency.UNVERIFIED, _BATCH_BLOCKS)
            if hashes:
                present = await self._ask(executor, hashes)
                self._driver.post(ev.BlocksVerified(self._tier, hashes, present))
                if all(is_there is None for is_there in present):
                    return  # the servers that have them do not answer
            if not self._next_row:
                break
            await asyncio.sleep(_PAUSE_S if hashes else 0)
        num_lost = num_before - self._num_blocks()
        _log.info(
            "verified the blocks of a tier", tier=self._tier, blocks=num_before, lost=num_lost
        )

    async def _sample(self, executor: TierExecutor) -> None:
        hashes = self._take(Residency.READY, _SAMPLE_BLOCKS)
        if not hashes:
            return
        present = await self._ask(executor, hashes)
        asked = split_hashes(hashes)
        lost = [each for each, there in zip(asked, present, strict=True) if there is False]
        if lost:
            self._driver.post(ev.BlocksLost(self._tier, b"".join(lost), "lost"))
        if len(lost) >= max(_LOST_MIN, _LOST_SHARE * len(asked)):
            why = f"{len(lost)} of {len(asked)} sampled blocks are gone"
            await self._driver.mark_unverified(self._tier, why)

    def _take(self, state: Residency, most: int) -> bytes:
        """Return the next blocks in a state, perhaps none; wraps around at the index's end."""
        index = self._index
        end = min(self._next_row + FEED_ROWS_AT_ONCE, index.extent)
        rows = np.arange(self._next_row, end)
        rows = rows[index.residency(rows, self._tier) == state][:most]
        self._next_row = int(rows[-1]) + 1 if len(rows) == most else end
        if self._next_row >= index.extent:
            self._next_row = 0
        return index.keys_of(rows).tobytes()

    async def _ask(self, executor: TierExecutor, hashes: bytes) -> tuple[bool | None, ...]:
        """Ask the tier. Raises TierError."""
        asked = split_hashes(hashes)
        present = await executor.run_in_background(
            "verification", lambda tier, until_ns: tier.contains(asked, until_ns), _LIMIT_NS
        )
        if self._driver.executors.get(self._tier) is not executor:
            raise TierError(f"{self._tier} has been detached")
        return tuple(present)

    def _num_blocks(self) -> int:
        states = (Residency.READY, Residency.UNVERIFIED)
        return sum(self._index.num_in(self._tier, state) for state in states)
