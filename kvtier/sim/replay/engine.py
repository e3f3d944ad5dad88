"""A simulated engine: one prompt computed after the other, or all at once where none is to wait.

It reports what its steps took, and what came of its decisions, once a second, like a real one.
"""

from collections import deque
from typing import Protocol

from kvtier.core.cost.sample import StepSample
from kvtier.core.plan import PlanOutcome
from kvtier.node import event as ev
from kvtier.sim.replay.agenda import Pipe
from kvtier.sim.replay.scene import Scene

__all__ = ["Computed", "ReplayEngine"]

_LOOKED_UP_MAX = 8
"""Requests that are looked up or loaded before their turn; the others are only announced."""

_REPORT_S = 1.0


class Computed(Protocol):
    """What an engine needs of a request."""

    @property
    def num_left(self) -> int:
        """Return the tokens of the prompt that are to be computed, as far as one knows."""

    def announce(self) -> None:
        """Say that it waits."""

    def begin(self) -> None:
        """Look up; ``ReplayEngine.make_ready`` follows."""

    def next_step(self) -> tuple[int, int] | None:
        """Return how many tokens to compute next, and behind how many; None: all is done."""

    def stepped(self, seconds: float) -> None:
        """Take in that the step is done."""

    def finish(self) -> None:
        """Take in that all is computed."""


class ReplayEngine:
    """See the module. ``is_shared``: requests wait for each other."""

    def __init__(self, scene: Scene, session: str, *, is_shared: bool) -> None:
        self.session = session
        self._scene = scene
        self._is_shared = is_shared
        self._prefill = scene.machine.prefill_model
        self._pipe = Pipe(scene.machine.cpu.latency_s)
        self._waiting: deque[Computed] = deque()
        self._open: list[Computed] = []
        """Looked up, loading, ready or computing, by arrival."""
        self._ready: deque[Computed] = deque()
        self._is_busy = False
        self._steps: list[StepSample] = []
        self._outcomes: list[PlanOutcome] = []
        self._is_report_due = False

    @property
    def num_waiting_tokens(self) -> int:
        """Return the tokens that it has to compute."""
        return sum(each.num_left for each in (*self._open, *self._waiting))

    def tokens_before(self, request: Computed) -> int:
        """Return the tokens it computes before those of a request that was begun."""
        if not self._is_shared:
            return 0
        before = self._open[: self._open.index(request)]
        return sum(each.num_left for each in before)

    def take(self, request: Computed) -> None:
        """Take in a request that has just come."""
        if self._is_shared and len(self._open) >= _LOOKED_UP_MAX:
            self._waiting.append(request)
            request.announce()
        else:
            self._open.append(request)
            request.begin()

    def make_ready(self, request: Computed) -> None:
        """Let a request compute when its turn comes."""
        if not self._is_shared:
            self._compute(request)
            return
        self._ready.append(request)
        self._go_on()

    def pipe(self) -> Pipe:
        """Return the way between arena and engine: its own, where requests do not share it."""
        return self._pipe if self._is_shared else Pipe(self._scene.machine.cpu.latency_s)

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Say with the next report what came of a decision."""
        self._outcomes.append(outcome)
        self._expect_report()

    def _go_on(self) -> None:
        if not self._is_busy and self._ready:
            self._is_busy = True
            self._compute(self._ready.popleft())

    def _compute(self, request: Computed) -> None:
        step = request.next_step()
        if step is None:
            self._end(request)
            return
        sample = self._prefill.sample(*step)
        self._steps.append(sample)
        self._expect_report()

        def stepped() -> None:
            request.stepped(sample.seconds)
            self._compute(request)

        self._scene.after(sample.seconds, stepped)

    def _end(self, request: Computed) -> None:
        self._open.remove(request)
        request.finish()
        if self._waiting:
            follower = self._waiting.popleft()
            self._open.append(follower)
            follower.begin()
        if self._is_shared:
            self._is_busy = False
            self._go_on()

    def _expect_report(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            self._scene.after(_REPORT_S, self._report)

    def _report(self) -> None:
        self._is_report_due = False
        steps, outcomes = tuple(self._steps), tuple(self._outcomes)
        self._steps.clear()
        self._outcomes.clear()
        self._scene.desk.ask(
            lambda call: ev.EngineTierReport(
                call, self.session, 0, 0, 0, 0, steps=steps, outcomes=outcomes
            )
        )
