"""Background checks of stored blocks: scrubs of local tiers, verification of shared ones.

A scrub reads a little every second. It never competes with reads: if any are queued or in flight,
it skips that second. The tier quarantines damaged blocks itself; they are reported to the node, so
that no lookup promises them.

A shared tier loses blocks without notice: its server restarts, is flushed, evicts keys, or keys
expire. So each verification step asks for a sample of the blocks that the index has there. If many
of them are gone, and after a restart or a failover, all blocks of the tier become unverified. An
unverified block is not served, and is written again if it is stored, until the tier confirms it.
Unverified blocks are checked in the background, at a bounded rate.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import numpy as np

from kvtier.core.identity import split_hashes
from kvtier.core.limits import FEED_ROWS_AT_ONCE
from kvtier.core.residency import Residency, TierName
from kvtier.errors import TierError, TierTimeout
from kvtier.node.messages import events as ev
from kvtier.observe.daemon_metrics import SCRUBBED_BYTES
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.runtime.driver import Driver
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.tiers.base import HealthState, Scrubbed

__all__ = ["ScrubProgress", "TierScrubber", "Verifier"]

_log = Log("kvtier.daemon")

_STEP_LIMIT_NS = 2_000_000_000
"""Time limit of one step: health checks wait for the same thread and must see faults in seconds."""

_TIMEOUTS_MAX = 5
"""Timeouts in a row that a requested pass tolerates: writes may delay it now and then."""

_PASS_STEP_BYTES = 16 << 20
"""Step of a requested pass: about ten milliseconds, which a read may have to wait."""

_YIELD_S = 0.01
"""Pause between two checks whether reads have ended."""

_HASHES_SHOWN_MAX = 100


@dataclass(slots=True)
class ScrubProgress:
    """Progress of a whole pass."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_expired: int = 0
    damaged: list[str] = field(default_factory=list)
    """The first damaged blocks, as hexadecimal hashes."""
    is_over: bool = False

    def add(self, step: Scrubbed, *, is_counted: bool) -> None:
        """Add the findings of a step; its totals count only in the pass that was requested."""
        if is_counted:
            self.num_blocks += step.num_blocks
            self.num_bytes += step.num_bytes
        self.num_damaged += len(step.damaged)
        self.num_expired += len(step.expired)
        room = _HASHES_SHOWN_MAX - len(self.damaged)
        self.damaged += [block_hash.hex() for block_hash in step.damaged[:room]]


class TierScrubber:
    """Scrubs one tier of ``driver``, one step at a time."""

    def __init__(self, driver: Driver, tier: TierName) -> None:
        self._driver = driver
        self._tier = tier
        self._warnings = RateLimitedLog(_log)
        self._lock = asyncio.Lock()
        self._is_between_passes = True

    async def step(self, max_bytes: int) -> None:
        """Verify about ``max_bytes``, unless reads are queued or in flight or a pass is requested.

        Raises TierError.
        """
        if self._lock.locked() or not self._may_begin():
            return
        async with self._lock:
            executor = self._executor()
            try:
                await self._scrub(max_bytes)
            except TierError:
                if self._driver.executors.get(self._tier) is executor:
                    raise  # otherwise it was detached, and there is nothing to scrub

    async def whole_pass(self) -> AsyncGenerator[ScrubProgress, None]:
        """Verify all blocks, after any reads; yields after each step. Raises TierError.

        First finishes a pass that background steps have begun; its blocks are not counted.
        """
        async with self._lock:
            progress = ScrubProgress()
            num_passes = 1 if self._is_between_passes else 2
            num_timeouts = 0
            while num_passes:
                while not self._may_begin():
                    self._check_up()
                    await asyncio.sleep(_YIELD_S)
                try:
                    step = await self._scrub(_PASS_STEP_BYTES)
                except TierTimeout:
                    num_timeouts += 1
                    if num_timeouts > _TIMEOUTS_MAX:
                        raise
                    continue
                num_timeouts = 0
                progress.add(step, is_counted=num_passes == 1)
                num_passes -= step.is_pass_over
                progress.is_over = not num_passes
                yield progress

    def _may_begin(self) -> bool:
        executor = self._driver.executors.get(self._tier)
        is_out = executor is None or executor.health().state is HealthState.OUT
        return not is_out and not self._driver.is_reading(self._tier)

    def _check_up(self) -> None:
        health = self._executor().health()
        if health.state is HealthState.OUT:
            raise TierError(f"{self._tier} is out: {health.reason}")

    def _executor(self) -> TierExecutor:
        executor = self._driver.executors.get(self._tier)
        if executor is None:
            raise TierError(f"{self._tier} is not attached")
        return executor

    def _check_same(self, executor: TierExecutor) -> None:
        if self._driver.executors.get(self._tier) is not executor:
            raise TierError(f"{self._tier} was detached during the scrub")

    async def _scrub(self, max_bytes: int) -> Scrubbed:
        executor = self._executor()
        try:
            step = await executor.run_in_background(
                "scrub", lambda tier, until_ns: tier.scrub(max_bytes, until_ns), _STEP_LIMIT_NS
            )
        except TierError:
            self._check_same(executor)
            raise
        self._check_same(executor)
        self._is_between_passes = step.is_pass_over
        self._driver.node.metrics.add(SCRUBBED_BYTES, step.num_bytes)
        for hashes, reason in (
            (step.damaged, "corrupt"),
            (step.expired, "expired"),
            (step.evicted, "lost"),
        ):
            if hashes:
                self._driver.post(ev.BlocksLost(self._tier, b"".join(hashes), reason))
        if step.damaged:
            self._warnings.warning(
                "scrub found damaged blocks", tier=self._tier, blocks=len(step.damaged)
            )
        return step


_log = Log("kvtier.node")

_SAMPLE_BLOCKS = 64
"""Blocks per step while none are unverified: 100,000 blocks take half an hour."""

_LOST_MIN = 8
_LOST_SHARE = 0.25
"""All blocks become unverified if at least this many, and this share, of a sample are gone."""

_BATCH_BLOCKS = 512
_PAUSE_S = 0.1
"""Pause between batches: 5,000 blocks a second, because many nodes may come back to a server at the
same time."""

_LIMIT_NS = 1_000_000_000
"""Time for one answer. Health checks wait for the same thread."""


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
                    return  # the servers with these blocks do not answer
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
        """Return which blocks the tier has, None where unknown. Raises TierError."""
        asked = split_hashes(hashes)
        present = await executor.run_in_background(
            "verification", lambda tier, until_ns: tier.contains(asked, until_ns), _LIMIT_NS
        )
        if self._driver.executors.get(self._tier) is not executor:
            raise TierError(f"{self._tier} was detached")
        return tuple(present)

    def _num_blocks(self) -> int:
        states = (Residency.READY, Residency.UNVERIFIED)
        return sum(self._index.num_in(self._tier, state) for state in states)
