"""Tier executor: runs a tier's blocking calls on threads, and determines its health for the node.

Theory
------
Calls that requests wait for have ``num_workers`` threads and one more, so that lookups and purges
do not wait for a full lane. Background calls (health checks, scrubs and the like) share one spare
thread, and so never take a thread from requests.

A call that does not return takes its tier out until it does. It occupies a thread, of which there
are few, but nothing waits for it. When the last such call has returned the tier is in use again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvtier.core.limits import EXISTENCE_CHECKS_MAX
from kvtier.errors import TierError, TierTimeout
from kvtier.observe.daemon_metrics import BACKGROUND_FAULTS
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.observe.metrics import Metrics
from kvtier.runtime.worker_pool import LateCall, WorkerPool
from kvtier.tiers.base import Health, HealthState
from kvtier.tiers.breaker import BreakerTier

__all__ = ["TierExecutor"]

_CHECK_PERIOD_NS = 2_000_000_000
"""How often a tier that is up is checked, so that an unused tier does not count as up when it is
not. A check writes a page: 170 MB a day to a drive."""

_CHECK_LIMIT_NS = 1_000_000_000

_WAIT_S = 3.0
"""Wait for the spare thread: other calls may be queued before, each with its own limit."""

_SPARE_QUEUE_MAX = 8
"""Calls that may wait for the spare thread; there are fewer kinds of them."""

T = TypeVar("T")


class TierExecutor:
    """The threads of ``tier``. Create and use it on the loop's thread."""

    def __init__(self, tier: BreakerTier, metrics: Metrics) -> None:
        self.tier = tier
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._log = Log("kvtier.node")
        self._warnings = RateLimitedLog(self._log)
        self.last_health = Health()
        """The tier's health at the last check, as reported to the node."""
        self._generation: int | None = None
        self.is_checking = False
        """Whether a health check is running or queued."""
        name, num_workers = tier.properties.name, tier.properties.num_workers
        self._workers = WorkerPool(
            f"kvtier-{name}", num_workers + 1, num_workers + EXISTENCE_CHECKS_MAX + 1
        )
        self._spare = WorkerPool(f"kvtier-{name}-spare", 1, _SPARE_QUEUE_MAX)

    def submit(self, run: Callable[[], None], what: str, deadline_ns: int) -> bool:
        """Run ``run``, which raises nothing, on a thread; False if too many calls are queued."""
        return self._workers.submit(run, what, deadline_ns - time.monotonic_ns())

    async def run_in_background(
        self, what: str, call: Callable[[BreakerTier, int], T], limit_ns: int
    ) -> T:
        """Make a call that no request waits for, on the spare thread; it is passed its deadline.

        Raises TierTimeout if it does not return in time, or was never started.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                publish = partial(
                    future.set_result, call(self.tier, time.monotonic_ns() + limit_ns)
                )
            except BaseException as error:  # passed on to the caller
                publish = partial(future.set_exception, error)
            self.to_loop(lambda: None if future.done() else publish())

        name = self.tier.properties.name
        if not self._spare.submit(run, what, limit_ns):
            raise TierTimeout(f"{name}: too many background calls are queued")
        try:
            async with asyncio.timeout(limit_ns / 1e9 + _WAIT_S):
                return await future
        except TimeoutError:
            raise TierTimeout(f"{name}: no answer to a {what} in time") from None

    def late_calls(self) -> list[LateCall]:
        """Return the calls that hang, the longest first; each occupies a thread."""
        now_ns = time.monotonic_ns()
        late = [*self._workers.late(now_ns), *self._spare.late(now_ns)]
        return sorted(late, key=lambda call: -call.seconds)

    def health(self) -> Health:
        """Return the tier's health: out while a call hangs, otherwise that of its breaker."""
        late = self.late_calls()
        if not late:
            return self.tier.health()
        reason = f"no answer to a {late[0].name} for {late[0].seconds:.0f} s"
        if len(late) > 1:
            reason += f", and {len(late)} calls hang"
        return Health(HealthState.OUT, reason)

    def check(self, on_change: Callable[[HealthState, HealthState], None]) -> None:
        """Report a change of state, and start a health check of the device if one is due."""
        before, health = self.last_health.state, self.health()
        self.last_health = health
        if health.state is not before:
            self._log_change(health)
            on_change(before, health.state)
        if not self.is_checking and self.tier.needs_health_check(_CHECK_PERIOD_NS):
            self.is_checking = self._spare.submit(
                self._check_device, "health check", _CHECK_LIMIT_NS
            )

    def has_new_generation(self) -> bool:
        """Return whether the tier may have lost blocks since the last call of this method."""
        before, self._generation = self._generation, self.tier.usage().generation
        return before is not None and before != self._generation

    @property
    def is_at_rest(self) -> bool:
        """Return whether no call is running or queued."""
        return self._workers.num_calls + self._spare.num_calls == 0

    def retire(self) -> None:
        """Take no more calls; queued calls are still made, since their completions are awaited."""
        self._workers.retire()
        self._spare.retire()

    def stop(self) -> None:
        """Start nothing more; threads in a call are left alone."""
        self._workers.stop()
        self._spare.stop()

    def to_loop(self, call: Callable[[], object]) -> None:
        """Call ``call`` on the loop's thread; may be used from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)

    def _log_change(self, health: Health) -> None:
        name = self.tier.properties.name
        if health.state is HealthState.UP:
            self._log.info("tier is up", tier=name)
        else:
            self._log.warning(f"tier is {health.state}", tier=name, reason=health.reason)

    def _check_device(self) -> None:
        """Check the device, so that the breaker learns its state; on the spare thread."""
        try:
            self.tier.health_check(time.monotonic_ns() + _CHECK_LIMIT_NS)
        except TierError as error:
            name = self.tier.properties.name
            self._warnings.warning("tier health check failed", tier=name, error=error)
        except Exception:
            self._metrics.add(BACKGROUND_FAULTS, task="health")
            self._warnings.exception(
                "unexpected error in a tier health check", tier=self.tier.properties.name
            )
        self.to_loop(self._check_ended)

    def _check_ended(self) -> None:
        self.is_checking = False
