"""Tier administration: which slow tiers serve, and how an operator changes that while requests run.

Theory
------
A tier is removed in steps. It is *drained* when nothing new is written to it, and *detached* when
it is not used at all: calls in flight have ended or were abandoned, the store is closed, and its
disk is free for others. A disk that hangs delays neither the daemon nor its operator: the tier is
off at once, and the status names what hangs until the store can be closed.

A tier is added as a whole or not at all, and is not used before (``attach``).

Rules
-----
* One change of a tier at a time. A new change ends the wait of whoever waits for an earlier one.
* Every wait has a deadline. After it the change goes on in the background, except a detachment
  that waits for calls to end: then the tier stays drained.
* Changes are not saved: the next start follows the configuration.
* A tier that could not be opened at the start is out until it can be opened; then it is attached as
  if by an operator. If an operator detaches it meanwhile, the attempts end.
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
    tell_blocks,
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

_LOOK_S = 0.02
"""Time between two checks whether a tier is at rest."""

_NOT_YET = Health(HealthState.OUT, "still being opened")

_FIXED: Mapping[TierName, tuple[str, str]] = {
    TierName.GPU: ("is an engine's own", "stop the engine, or `kvtier drop --tier gpu`"),
    TierName.CPU: (
        "is the way to all others, and engines have mapped it",
        "`kvtier drop --tier cpu` empties it; cpu.capacity is its size from the next start on",
    ),
}
"""Why a tier stays, and what may have been meant."""


class TierAdmin:
    """Takes tiers of ``driver`` off and puts them on, as ``config`` says by then."""

    def __init__(self, driver: Driver, config: Callable[[], Config], open_tier: OpenTier) -> None:
        self._driver = driver
        self._config = config
        self._open_tier = open_tier
        self._places = {name: config().tiers[name].place for name in driver.tiers}
        self._openings: dict[TierName, Opening] = {}
        self._unopened: dict[TierName, Health] = {}
        """Tiers that were not open when the start was complete, and why."""
        self._attaching: dict[TierName, asyncio.Task[None]] = {}
        self._num_told: dict[TierName, int] = {}
        """How many blocks of a tier that is being attached the node knows so far."""
        self._detaches: list[TierDetach] = []
        """Tiers that were detached and are perhaps not closed yet."""
        self._warnings = RateLimitedLog(_log)
        self.on_attach: Callable[[TierName, Config], Awaitable[None]] | None = None
        """Called before a tier is attached."""

    def expect(self, late: Mapping[TierName, Opening]) -> None:
        """Attach these tiers, which are not open yet or could not be opened, once they are."""
        self._openings = dict(late)
        self._unopened = dict.fromkeys(late, _NOT_YET)

    # What there is

    def is_free(self, key: str) -> bool:
        """Tell whether a key is one of a tier that is not in use, nor about to be."""
        name = next((each for each in SLOW_TIERS if key.startswith(f"{each}.")), None)
        is_off = name is not None and self._admin_state(name) is AdminState.DETACHED
        return is_off and name not in self._attaching

    def health(self, name: TierName) -> Health | None:
        """Return how a slow tier does, or what its operator made of it; None: it is off.

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
        ):  # also of a drained tier: it is still read from
            return Health(HealthState.OUT, f"{executor.last_health.reason}; drained by an operator")
        num_left = self._driver.node.cache.index.num_in(name, Residency.WRITING)
        queued = f"; {num_left} blocks are yet to be written" if num_left else ""
        trouble = f"; {executor.last_health.reason}" if executor.last_health.reason else ""
        return Health(HealthState.DRAINED, f"by an operator{queued}{trouble}")

    def _absence(self, name: TierName) -> str:
        if name in self._attaching:
            return f"; being attached, {self._num_told[name]} blocks so far"
        leaving = self._leaving(name)
        hangs = "".join(f": {each.hangs}" for each in leaving if each.hangs)
        return f"; not closed yet{hangs}" if leaving else ""

    # Verbs

    async def drain(self, name: TierName, wait_s: float) -> bool:
        """Write nothing new to a tier; True once nothing is on its way to it. Raises StartError."""
        lane = self._in_use(name)
        self._set(lane, AdminState.READ_ONLY)

        def is_drained() -> bool:
            return not lane.writes and all(each.is_read for each in lane.in_flight.values())

        return await self._until(lane, is_drained, wait_s)

    async def resume(self, name: TierName) -> bool:
        """Use a drained tier as before. Raises StartError."""
        self._set(self._in_use(name), AdminState.ACTIVE)
        return True

    async def detach(self, name: TierName, wait_s: float, *, is_now: bool = False) -> bool:
        """Take a tier off; True once it is closed. Raises StartError where it is not at rest.

        ``is_now``: what is under way is given up, and computed.
        """
        until_s = time.monotonic() + wait_s
        if self._admin_state(name) is not AdminState.DETACHED:
            if not is_now:
                await self._rest(self._in_use(name), wait_s)
            if (
                self._admin_state(name) is not AdminState.DETACHED
            ):  # else another operator was faster
                self._take_off(name)
        elif name in self._attaching:
            self._attaching[name].cancel()
            await asyncio.wait({self._attaching[name]}, timeout=wait_s)
        elif self._lane(name) is None and name not in self._unopened:
            self._in_use(name)  # says why not
        if name in self._unopened:
            self._unopened[name] = Health(HealthState.DETACHED, "by an operator")
        for detach in self._leaving(name):
            await detach.closed(max(0.0, until_s - time.monotonic()))
        return not self._leaving(name)

    async def attach(self, name: TierName, wait_s: float) -> bool:
        """Use a tier as it is configured now; True once it is in use. Raises StartError."""
        admin_state = self._admin_state(name)
        if admin_state in {AdminState.READ_ONLY, AdminState.DETACHING}:
            raise StartError(name, "is not detached", f"`kvtier tier resume {name}` has it written")
        if admin_state is AdminState.ACTIVE:
            return True
        attaching = self._attaching.get(name) or self._begin_attach(name)
        await asyncio.wait({attaching}, timeout=wait_s)
        if attaching.cancelled():
            raise StartError(name, "was detached while it was being attached", "attach it again")
        if attaching.done():
            attaching.result()
        return attaching.done()

    async def retry(self) -> None:
        """Try again to open the tiers that could not be opened at the start."""
        for name, health in list(self._unopened.items()):
            if name not in configured(self._config()):  # a reload has removed it
                del self._unopened[name]
            elif health.state is HealthState.OUT and name not in self._attaching:
                with contextlib.suppress(StartError):  # an earlier attempt is not closed yet
                    self._begin_attach(name)

    async def stop(self) -> None:
        """Stop changes in progress: the process is about to end, and its locks with it."""
        attaching_now = list(self._attaching.values())
        for attaching in attaching_now:
            attaching.cancel()
        if attaching_now:
            await asyncio.wait(attaching_now)
        for detach in self._detaches:
            await detach.stop()

    # Off

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
            state = "detached" if lane else "off: there is no such tier here"
            raise StartError(name, f"is {state}", f"`kvtier tier attach {name}` puts it on")
        return lane

    def _set(self, lane: TransferLane, admin_state: AdminState) -> None:
        if lane.admin_state is not admin_state:
            self._driver.post(ev.SetAdminState(lane.tier.name, admin_state))
            _log.info("tier state changed", tier=lane.tier.name, admin_state=admin_state)

    async def _rest(self, lane: TransferLane, wait_s: float) -> None:
        """Let a tier come to rest; where that takes too long, or nobody waits, it is drained."""
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
                f"is not at rest, and stays drained: {_open_work(lane, executor)}",
                "wait longer, or have that computed instead with --now",
            )

    async def _until(self, lane: TransferLane, is_done: Callable[[], bool], wait_s: float) -> bool:
        """Wait until something is so, at most so long, and while the tier stays in its state."""
        admin_state, until_s = lane.admin_state, time.monotonic() + wait_s
        while not is_done():
            if time.monotonic() >= until_s:
                return False
            await asyncio.sleep(_LOOK_S)
            if lane.admin_state is AdminState.DETACHED:
                return True  # another operator took it off
            if lane.admin_state is not admin_state:
                raise StartError(
                    lane.tier.name, "was changed by another command meanwhile", "try again"
                )
        return True

    def _take_off(self, name: TierName) -> None:
        executor = self._driver.detach(name)
        _log.info("a tier was detached", tier=name)
        self._begin_detach(
            TierDetach(self._driver, executor.tier, executor, self._places.pop(name))
        )

    def _begin_detach(self, detach: TierDetach) -> None:
        self._detaches = [each for each in self._detaches if not each.is_closed]
        self._detaches.append(detach)

    def _leaving(self, name: TierName) -> list[TierDetach]:
        """Return the tiers of that name that are not closed yet."""
        return [each for each in self._detaches if each.name is name and not each.is_closed]

    # On

    def _check_wanted(self, name: TierName) -> None:
        if name not in SLOW_TIERS:
            raise StartError(name, *_FIXED[name])
        config = self._config()
        if name not in configured(config):
            raise StartError(
                f"{name}.{config.tiers[name].switch_key}",
                "says that there is no such tier",
                "set it, and have the configuration read again",
            )
        place = config.tiers[name].place
        if any(detach.place == place for detach in self._leaving(name)):
            raise StartError(
                place_key(config, name),
                f"the tier that was detached has it still{self._absence(name)}",
                "mend what hangs, or name another one",
            )

    def _begin_attach(self, name: TierName) -> asyncio.Task[None]:
        self._check_wanted(name)
        self._num_told[name] = 0
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
            await tell_blocks(self._driver, tier, partial(self._count_told, name))
            if self.on_attach is not None:
                await self.on_attach(name, config)
        except BaseException as error:
            self._begin_detach(TierDetach(self._driver, tier, None, config.tiers[name].place))
            if isinstance(error, TierError):
                raise StartError(
                    place_key(config, name), str(error), "repair it or set another"
                ) from error
            raise
        self._places[name] = config.tiers[name].place
        now = self._config()  # a reload may have changed what it may
        tune_tier(now, tier)
        self._driver.post(ev.ConfigureTier(placement(now, tier)))
        self._driver.attach(tier)
        self._unopened.pop(name, None)
        _log.info("a tier was attached", tier=name, blocks=self._num_told[name])

    def _count_told(self, name: TierName, num_blocks: int) -> None:
        self._num_told[name] += num_blocks

    def _attach_ended(self, name: TierName, attaching: asyncio.Task[None]) -> None:
        del self._attaching[name]
        if attaching.cancelled() or (error := attaching.exception()) is None:
            return
        if name in self._unopened and self._unopened[name].state is HealthState.OUT:
            self._unopened[name] = Health(HealthState.OUT, str(error))
            self._warnings.warning("a tier cannot be opened", tier=name, error=error)
        else:
            _log.error("a tier could not be attached", tier=name, error=error)


def _open_work(lane: TransferLane, executor: TierExecutor) -> str:
    """Say what is still to be done by a tier, and what of it hangs; nothing where it is at rest."""
    num_read = sum(len(each.rows) for each in lane.in_flight.values() if each.is_read)
    num_written = sum(len(each.rows) for each in lane.in_flight.values() if not each.is_read)
    late = executor.late_calls()
    found = {
        f"{len(lane.reads) + num_read} blocks to read": lane.reads or num_read,
        f"{len(lane.writes) + num_written} blocks to write": lane.writes or num_written,
        "blocks to drop": lane.purging is not None,
        "a call in the background": lane.is_idle and not executor.is_at_rest,
        f"no answer to a {late[0].name} for {late[0].seconds:.0f} s" if late else "": late,
    }
    return ", ".join(what for what, is_so in found.items() if is_so)
