"""Drains, detaches and attaches slow tiers for operators, while requests are served.

Theory
------
A tier is *drained* when nothing new is written to it, and *detached* when it is not used at all:
calls in flight have ended or were abandoned, the store is closed, and its device is free.
A device that does not answer delays neither the daemon nor the operator: the tier is off at once,
and the status names the stuck call until the store can be closed.

A tier is used only once it is attached completely: it is open, and the node knows its blocks.

Rules
-----
* Changes of a tier run one at a time. A new change ends the wait for an earlier one.
* Every wait has a deadline. After it the change continues in the background, except a detach that
  waits for calls to end: then the tier stays drained.
* Changes are not saved: the next start follows the configuration.
* A tier that could not be opened at the start is out, and is attached once it can be opened. If an
  operator detaches it meanwhile, the attempts end.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from kvtier.config import Config
from kvtier.core.residency import SLOW_TIERS, Residency, TierName
from kvtier.core.slow_tier import AdminState
from kvtier.daemon.tiers.detach import TierDetach
from kvtier.daemon.tiers.opening import (
    Opening,
    OpenTier,
    begin_opening,
    configured,
    opened,
    place_key,
    placement,
    report_blocks,
    tune_tier,
)
from kvtier.errors import StartError, TierError
from kvtier.node.messages import events as ev
from kvtier.node.state.transfer import TransferLane
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.runtime.driver import Driver
from kvtier.runtime.tier_executor import TierExecutor
from kvtier.tiers.base import Health, HealthState

__all__ = ["TierAdmin"]

_log = Log("kvtier.daemon")

_POLL_S = 0.02
"""Time between checks whether a tier is idle."""

_NOT_YET = Health(HealthState.OUT, "still being opened")

_FIXED: Mapping[TierName, tuple[str, str]] = {
    TierName.GPU: ("belongs to the engines", "stop the engine, or run `kvtier drop --tier gpu`"),
    TierName.CPU: (
        "cannot be drained or detached: all other tiers go through it",
        "`kvtier drop --tier cpu` empties it; a new cpu.capacity needs a restart",
    ),
}
"""Why a tier cannot be drained or detached, and what to do instead."""


class TierAdmin:
    """Changes the tiers of ``driver``; attached tiers follow the current ``config``."""

    def __init__(self, driver: Driver, config: Callable[[], Config], open_tier: OpenTier) -> None:
        self._driver = driver
        self._config = config
        self._open_tier = open_tier
        self._places = {name: config().tiers[name].place for name in driver.tiers}
        self._openings: dict[TierName, Opening] = {}
        self._unopened: dict[TierName, Health] = {}
        """Tiers that were not open at the end of the start, and why."""
        self._attaching: dict[TierName, asyncio.Task[None]] = {}
        self._num_reported: dict[TierName, int] = {}
        """Number of blocks that the node knows so far, for each tier that is being attached."""
        self._detaches: list[TierDetach] = []
        """Detached tiers that may not be closed yet."""
        self._warnings = RateLimitedLog(_log)
        self.on_attach: Callable[[TierName, Config], Awaitable[None]] | None = None
        """Called before a tier is attached."""

    def expect(self, late: Mapping[TierName, Opening]) -> None:
        """Attach tiers that are still being opened, or could not be opened, once they are open."""
        self._openings = dict(late)
        self._unopened = dict.fromkeys(late, _NOT_YET)

    # State

    def is_free(self, key: str) -> bool:
        """Return whether a key belongs to a tier that is neither in use nor being attached."""
        name = next((each for each in SLOW_TIERS if key.startswith(f"{each}.")), None)
        is_off = name is not None and self._admin_state(name) is AdminState.DETACHED
        return is_off and name not in self._attaching

    def health(self, name: TierName) -> Health | None:
        """Return the health or administrative state of a slow tier; None if it is off.

        On the loop's thread.
        """
        if (unopened := self._unopened.get(name)) is not None:
            return unopened
        lane, executor = self._lane(name), self._driver.executors.get(name)
        if lane is None and name not in self._attaching:
            return None
        if lane is None or executor is None:
            return Health(HealthState.DETACHED, f"by an operator{self._absence(name)}")
        if lane.admin_state is AdminState.ACTIVE:
            return executor.last_health
        if (
            executor.last_health.state is HealthState.OUT
        ):  # matters for a drained tier as well: it is still read
            return Health(HealthState.OUT, f"{executor.last_health.reason}; drained by an operator")
        num_left = self._driver.node.cache.index.num_in(name, Residency.WRITING)
        queued = f"; {num_left} blocks still to be written" if num_left else ""
        trouble = f"; {executor.last_health.reason}" if executor.last_health.reason else ""
        return Health(HealthState.DRAINED, f"by an operator{queued}{trouble}")

    def _absence(self, name: TierName) -> str:
        if name in self._attaching:
            return f"; being attached, {self._num_reported[name]} blocks so far"
        leaving = self._leaving(name)
        hangs = "".join(f": {each.hangs}" for each in leaving if each.hangs)
        return f"; not closed yet{hangs}" if leaving else ""

    # Operations

    async def drain(self, name: TierName, wait_s: float) -> bool:
        """Stop writing to a tier; returns True once no write is left. Raises StartError."""
        lane = self._in_use(name)
        self._set(lane, AdminState.READ_ONLY)

        def is_drained() -> bool:
            return not lane.writes and all(each.is_read for each in lane.in_flight.values())

        return await self._until(lane, is_drained, wait_s)

    async def resume(self, name: TierName) -> bool:
        """Write to a drained tier again. Raises StartError."""
        self._set(self._in_use(name), AdminState.ACTIVE)
        return True

    async def detach(self, name: TierName, wait_s: float, *, is_now: bool = False) -> bool:
        """Detach a tier; True once it is closed. Raises StartError if transfers do not end in time.

        ``is_now`` aborts transfers in flight; affected blocks are recomputed.
        """
        until_s = time.monotonic() + wait_s
        if self._admin_state(name) is not AdminState.DETACHED:
            if not is_now:
                await self._rest(self._in_use(name), wait_s)
            if (
                self._admin_state(name) is not AdminState.DETACHED
            ):  # unless another operator was faster
                self._take_off(name)
        elif name in self._attaching:
            self._attaching[name].cancel()
            await asyncio.wait({self._attaching[name]}, timeout=wait_s)
        elif self._lane(name) is None and name not in self._unopened:
            self._in_use(name)  # raises the reason
        if name in self._unopened:
            self._unopened[name] = Health(HealthState.DETACHED, "by an operator")
        for detach in self._leaving(name):
            await detach.closed(max(0.0, until_s - time.monotonic()))
        return not self._leaving(name)

    async def attach(self, name: TierName, wait_s: float) -> bool:
        """Attach a tier with its current settings; True once it is in use. Raises StartError."""
        admin_state = self._admin_state(name)
        if admin_state in {AdminState.READ_ONLY, AdminState.DETACHING}:
            raise StartError(name, "is not detached", f"use `kvtier tier resume {name}`")
        if admin_state is AdminState.ACTIVE:
            return True
        attaching = self._attaching.get(name) or self._begin_attach(name)
        await asyncio.wait({attaching}, timeout=wait_s)
        if attaching.cancelled():
            raise StartError(name, "was detached meanwhile", "attach it again")
        if attaching.done():
            attaching.result()
        return attaching.done()

    async def retry(self) -> None:
        """Retry opening the tiers that could not be opened at the start."""
        for name, health in list(self._unopened.items()):
            if name not in configured(self._config()):  # a reload has removed it
                del self._unopened[name]
            elif health.state is HealthState.OUT and name not in self._attaching:
                with contextlib.suppress(StartError):  # an earlier one is not closed yet
                    self._begin_attach(name)

    async def stop(self) -> None:
        """Cancel changes in progress: the process is about to end, which releases its locks."""
        attaching_now = list(self._attaching.values())
        for attaching in attaching_now:
            attaching.cancel()
        if attaching_now:
            await asyncio.wait(attaching_now)
        for detach in self._detaches:
            await detach.stop()

    # Detach

    def _lane(self, name: TierName) -> TransferLane | None:
        return self._driver.node.transfers.lanes.get(name)

    def _admin_state(self, name: TierName) -> AdminState:
        lane = self._lane(name)
        return AdminState.DETACHED if lane is None else lane.admin_state

    def _in_use(self, name: TierName) -> TransferLane:
        """Return the lane of a tier that is in use. Raises StartError."""
        if name in _FIXED:
            raise StartError(name, *_FIXED[name])
        lane = self._lane(name)
        if lane is None or lane.admin_state is AdminState.DETACHED:
            state = "detached" if lane else "off: it is not configured"
            raise StartError(name, f"is {state}", f"use `kvtier tier attach {name}`")
        return lane

    def _set(self, lane: TransferLane, admin_state: AdminState) -> None:
        if lane.admin_state is not admin_state:
            self._driver.post(ev.SetAdminState(lane.tier.name, admin_state))
            _log.info("tier state changed", tier=lane.tier.name, admin_state=admin_state)

    async def _rest(self, lane: TransferLane, wait_s: float) -> None:
        """Wait until a tier is idle; if that takes too long, leave it drained."""
        executor = self._driver.executors[lane.tier.name]
        self._set(lane, AdminState.DETACHING)
        try:
            has_rest = await self._until(lane, lambda: not _open_work(lane, executor), wait_s)
        except BaseException:
            if lane.admin_state is AdminState.DETACHING:
                self._set(lane, AdminState.READ_ONLY)
            raise
        if not has_rest:
            self._set(lane, AdminState.READ_ONLY)
            raise StartError(
                lane.tier.name,
                f"is still busy, and stays drained: {_open_work(lane, executor)}",
                "wait longer, or abort the transfers with --now",
            )

    async def _until(self, lane: TransferLane, is_done: Callable[[], bool], wait_s: float) -> bool:
        """Wait until ``is_done``, at most ``wait_s``, and only while the tier keeps its state."""
        admin_state, until_s = lane.admin_state, time.monotonic() + wait_s
        while not is_done():
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_POLL_S)
            if lane.admin_state is AdminState.DETACHED:
                return True  # another operator took it off
            if lane.admin_state is not admin_state:
                raise StartError(
                    lane.tier.name, "was changed by another command meanwhile", "try again"
                )
        return True

    def _take_off(self, name: TierName) -> None:
        executor = self._driver.detach(name)
        _log.info("tier detached", tier=name)
        self._begin_detach(
            TierDetach(self._driver, executor.tier, executor, self._places.pop(name))
        )

    def _begin_detach(self, detach: TierDetach) -> None:
        self._detaches = [each for each in self._detaches if not each.is_closed]
        self._detaches.append(detach)

    def _leaving(self, name: TierName) -> list[TierDetach]:
        """Return the detached tiers of that name that are not closed yet."""
        return [each for each in self._detaches if each.name is name and not each.is_closed]

    # Attach

    def _check_wanted(self, name: TierName) -> None:
        if name not in SLOW_TIERS:
            raise StartError(name, *_FIXED[name])
        config = self._config()
        if name not in configured(config):
            raise StartError(
                f"{name}.{config.tiers[name].switch_key}",
                "disables the tier",
                "set it, and reload the configuration",
            )
        place = config.tiers[name].place
        if any(detach.place == place for detach in self._leaving(name)):
            raise StartError(
                place_key(config, name),
                f"is still in use by the detached tier{self._absence(name)}",
                "fix the device that hangs, or set another one",
            )

    def _begin_attach(self, name: TierName) -> asyncio.Task[None]:
        self._check_wanted(name)
        self._num_reported[name] = 0
        attaching = asyncio.create_task(self._attach(name))
        self._attaching[name] = attaching
        attaching.add_done_callback(partial(self._attach_ended, name))
        return attaching

    async def _attach(self, name: TierName) -> None:
        for detach in self._detaches:
            await detach.forgotten()
        config = self._config()
        opening = self._openings.pop(name, None) or begin_opening(config, name, self._open_tier)
        tier = await opened(opening)
        try:
            self._driver.post(ev.ConfigureTier(placement(config, tier)))
            await report_blocks(self._driver, tier, partial(self._count_reported, name))
            if self.on_attach is not None:
                await self.on_attach(name, config)
        except BaseException as error:
            self._begin_detach(TierDetach(self._driver, tier, None, config.tiers[name].place))
            if isinstance(error, TierError):
                raise StartError(
                    place_key(config, name), str(error), "repair it, or set another one"
                ) from error
            raise
        self._places[name] = config.tiers[name].place
        now = self._config()  # it may have been reloaded meanwhile
        tune_tier(now, tier)
        self._driver.post(ev.ConfigureTier(placement(now, tier)))
        self._driver.attach(tier)
        self._unopened.pop(name, None)
        _log.info("tier attached", tier=name, blocks=self._num_reported[name])

    def _count_reported(self, name: TierName, num_blocks: int) -> None:
        self._num_reported[name] += num_blocks

    def _attach_ended(self, name: TierName, attaching: asyncio.Task[None]) -> None:
        del self._attaching[name]
        if attaching.cancelled() or (error := attaching.exception()) is None:
            return
        if name in self._unopened and self._unopened[name].state is HealthState.OUT:
            self._unopened[name] = Health(HealthState.OUT, str(error))
            self._warnings.warning("cannot open tier", tier=name, error=error)
        else:
            _log.error("cannot attach tier", tier=name, error=error)


def _open_work(lane: TransferLane, executor: TierExecutor) -> str:
    """Return the pending and stuck work of a tier; empty if it is idle."""
    num_read = sum(len(each.rows) for each in lane.in_flight.values() if each.is_read)
    num_written = sum(len(each.rows) for each in lane.in_flight.values() if not each.is_read)
    late = executor.late_calls()
    found = {
        f"{len(lane.reads) + num_read} blocks to read": lane.reads or num_read,
        f"{len(lane.writes) + num_written} blocks to write": lane.writes or num_written,
        "blocks to drop": lane.purging is not None,
        "a background call": lane.is_idle and not executor.is_at_rest,
        f"no answer to a {late[0].name} for {late[0].seconds:.0f} s" if late else "": late,
    }
    return ", ".join(what for what, is_so in found.items() if is_so)
