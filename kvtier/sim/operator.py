"""An operator of a run: drains tiers, takes them off and puts them on again, at any moment.

While a tier is off, somebody else has its medium, and may do to it what he likes. What is under way
for a tier that left is told all the same, or never; to its medium it does nothing more, save that a
server may still get what was sent.
"""

from collections.abc import Generator
from dataclasses import replace

from kvtier.core.identity import EVERYTHING
from kvtier.core.residency import TierName
from kvtier.node import event as ev
from kvtier.node.transfer import Duty
from kvtier.sim.fleet import Fleet
from kvtier.sim.world import MS, World
from kvtier.testing.stage import Stage

__all__ = ["Operator"]

_FAR_NS = 1 << 62

_ROWS_AT_ONCE = 8

_Task = Generator[int, None, None]
"""Yields how long to wait before it is resumed."""


class Operator:
    """Changes one tier at a time, or two at once, as they come."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet
        self._busy: set[tuple[Stage, TierName]] = set()
        """Tiers that are just leaving or coming, which one does once at a time."""

    def act(self) -> None:
        """Change what a tier is used for."""
        world, draw = self._world, self._world.draw
        stage, name = world.stage, world.some_tier()
        lane = stage.node.transfers.lanes[name]
        if (stage, name) in self._busy:
            return
        choice = draw.choice(("duty", "leave", "leave"))
        if choice == "duty":
            stage.post(ev.TierDuty(name, Duty.READS if lane.duty is Duty.FULL else Duty.FULL))
            return
        self._busy.add((stage, name))
        self._resume(stage, self._leave_and_come(stage, name))

    def _resume(self, stage: Stage, task: _Task) -> None:
        """Take a task's next step, unless its node has died."""
        if stage is not self._world.stage:
            task.close()
        elif (delay_ns := next(task, None)) is not None:
            self._world.at(delay_ns, lambda: self._resume(stage, task))

    def _leave_and_come(self, stage: Stage, name: TierName) -> _Task:
        draw = self._world.draw
        yield from self._leave(stage, name)
        yield draw.randint(0, 100) * MS
        if name is TierName.SSD:
            self._use_otherwise(name)
        yield draw.randint(0, 100) * MS
        yield from self._come(stage, name)
        self._busy.discard((stage, name))

    def _leave(self, stage: Stage, name: TierName) -> _Task:
        """Take a tier off once it is at rest, or sooner; then have all of it forgotten."""
        draw, lane = self._world.draw, stage.node.transfers.lanes[name]
        if draw.random() < 0.7:
            stage.post(ev.TierDuty(name, Duty.LAST))
            for _ in range(draw.choice((0, 5, 50))):
                if lane.is_idle and lane.purging is None:
                    break
                yield 10 * MS
        self._world.left(name)
        stage.post(ev.TierDuty(name, Duty.NONE))
        index, first = stage.node.cache.index, 0
        while first < index.extent:
            yield draw.choice((0, 0, 0, 1)) * MS
            stage.post(ev.Forget(name, first, first + _ROWS_AT_ONCE))
            first += _ROWS_AT_ONCE
        assert not len(index.held(index.rows(), name)), "a detached tier still has blocks"

    def _use_otherwise(self, name: TierName) -> None:
        """Let another daemon have the medium: it drops blocks, and stores its own."""
        medium, draw = self._world.tiers[name], self._world.draw
        if draw.random() < 0.3:
            medium.purge(EVERYTHING, _FAR_NS)
        for _ in range(draw.randint(0, 3)):
            medium.write(draw.choice(self._fleet.customers).prompt(), _FAR_NS)
            medium.lose()

    def _come(self, stage: Stage, name: TierName) -> _Task:
        """Tell the node what a tier holds, a little at a time, and have it used."""
        draw, lane = self._world.draw, stage.node.transfers.lanes[name]
        workers = draw.choice((1, 2, lane.tier.num_workers))
        stage.post(ev.TierSettings(replace(lane.tier, num_workers=workers)))
        if name is TierName.SSD:  # what a shared one holds only it knows
            for headers in self._world.tiers[name].headers():
                for first in range(0, len(headers), _ROWS_AT_ONCE):
                    yield draw.choice((0, 0, 0, 1)) * MS
                    stage.post(ev.BlocksRecovered(name, headers[first : first + _ROWS_AT_ONCE]))
        yield draw.randint(0, 5) * MS
        stage.post(ev.TierDuty(name, Duty.FULL))
