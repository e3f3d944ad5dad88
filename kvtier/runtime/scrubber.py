"""The scrub: stored blocks are verified before anyone asks for them, a little every second.

It never competes with reads: where any wait or are under way, the second's share is let go. What
it finds damaged, the tier has quarantined already; the node is told, so that no lookup promises it.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvtier.core.residency import TierName
from kvtier.errors import TierError, TierTimeout
from kvtier.node.messages import events as ev
from kvtier.observe.daemon_metrics import SCRUBBED_BYTES
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.runtime.driver import Driver
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.tiers.base import HealthState, Scrubbed

__all__ = ["ScrubProgress", "TierScrubber"]

_log = Log("kvtier.daemon")

_STEP_LIMIT_NS = 2_000_000_000
"""Probes wait for the same thread, and they should notice trouble within seconds."""

_TIMEOUTS_MAX = 5
"""In a row, of a pass that somebody waits for: writes may be in its way now and then."""

_PASS_STEP_BYTES = 16 << 20
"""Of a pass that somebody waits for: some ten milliseconds, which is what a read may wait."""

_YIELD_S = 0.01
"""Between two looks whether reads are over."""

_HASHES_SHOWN_MAX = 100


@dataclass(slots=True)
class ScrubProgress:
    """What a whole pass has seen so far."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_damaged: int = 0
    num_expired: int = 0
    damaged: list[str] = field(default_factory=list)
    """The first of them, in hexadecimal digits."""
    is_over: bool = False

    def add(self, step: Scrubbed, *, is_counted: bool) -> None:
        """Note what a step found, and where it is of the pass that counts, what it saw."""
        if is_counted:
            self.num_blocks += step.num_blocks
            self.num_bytes += step.num_bytes
        self.num_damaged += len(step.damaged)
        self.num_expired += len(step.expired)
        room = _HASHES_SHOWN_MAX - len(self.damaged)
        self.damaged += [block_hash.hex() for block_hash in step.damaged[:room]]


class TierScrubber:
    """Scrubs one tier of ``driver``; one step at a time, whoever asks."""

    def __init__(self, driver: Driver, tier: TierName) -> None:
        self._driver = driver
        self._tier = tier
        self._warnings = RateLimitedLog(_log)
        self._lock = asyncio.Lock()
        self._is_between_passes = True

    async def step(self, max_bytes: int) -> None:
        """Verify about ``max_bytes``, unless reads are at work or somebody waits for a pass.

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
                    raise  # else it was detached meanwhile, and there is nothing to scrub

    async def whole_pass(self) -> AsyncGenerator[ScrubProgress, None]:
        """Verify everything, reads first; yields after each step. Raises TierError.

        A pass that a second's share has begun is ended first, and what it sees is not counted.
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
            raise TierError(f"{self._tier} is not in use: there is none, or it was detached")
        return executor

    def _check_same(self, executor: TierExecutor) -> None:
        if self._driver.executors.get(self._tier) is not executor:
            raise TierError(f"{self._tier} was detached meanwhile")

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
                "damaged blocks were found", tier=self._tier, blocks=len(step.damaged)
            )
        return step
