"""Replays a trace event by event, so that a policy's benefit shows in seconds, not only tokens."""

from collections import deque
from collections.abc import Callable
from itertools import cycle

from kvtier.sim.replay.context import EventQueue, LinkTimer, ReplayContext
from kvtier.sim.replay.engine import ReplayEngine, ReplayRequest
from kvtier.sim.replay.node_adapter import NodeAdapter
from kvtier.sim.replay.prefill import PrefillModel
from kvtier.sim.replay.results import ReplayRun, RequestResult
from kvtier.sim.replay.setup import Machine, ReplaySetup
from kvtier.sim.replay.trace import Trace

__all__ = ["replay_timed"]

_SESSIONS = 16
"""Sessions of unlimited engines: enough that none reaches the limits of a session."""


def replay_timed(
    trace: Trace, setup: ReplaySetup, on_progress: Callable[[int], None] = lambda _: None
) -> ReplayRun:
    """Replay a trace; ``on_progress`` is called with the number of finished requests."""
    return _Timed(trace, setup, on_progress).run()


class _Timed:
    def __init__(
        self, trace: Trace, setup: ReplaySetup, on_progress: Callable[[int], None]
    ) -> None:
        machine = setup.machine
        self._trace = trace
        self._setup = setup
        self._on_progress = on_progress
        self._events = EventQueue()
        timer = LinkTimer(self._events, machine.ssd)
        self._adapter = NodeAdapter(setup, trace.block_tokens, timer, lambda: self._events.now_ns)
        self._context = ReplayContext(trace, machine, self._events, self._adapter)
        count = machine.engines.count
        self._engines = [
            ReplayEngine(
                self._context, self._adapter.register(f"replay {number}"), is_shared=count > 0
            )
            for number in range(count or _SESSIONS)
        ]
        self._is_shared = count > 0
        self._turns = cycle(self._engines)
        self._cold = _cold_ttfts(trace, machine)
        self._records: dict[int, RequestResult] = {}
        self._half = (0, 0)

    def run(self) -> ReplayRun:
        self._arrive(0)
        while self._events.step():
            pass
        assert len(self._records) == len(self._trace.requests), "every request ends"
        records = [self._records[number] for number in range(len(self._trace.requests))]
        return ReplayRun.of(self._setup, records, self._adapter, self._half)

    def _arrive(self, number: int) -> None:
        """Schedule the arrival of a request, and then the next one."""
        if number == len(self._trace.requests):
            return

        def come() -> None:
            if self._trace.requests[number].at_ns < self._trace.requests[-1].at_ns / 2:
                self._half = self._adapter.gate_counts()
            engine = next(self._turns)
            if self._is_shared:
                engine = min(self._engines, key=lambda each: each.num_waiting_tokens)
            engine.take(ReplayRequest(self._context, engine, number, self._done))
            self._arrive(number + 1)

        self._events.at(self._trace.requests[number].at_ns, come)

    def _done(self, visit: ReplayRequest) -> None:
        tokens = {
            tier: count * self._trace.block_tokens for tier, count in sorted(visit.hits.items())
        }
        self._records[visit.number] = RequestResult(
            at_ns=visit.request.at_ns,
            num_tokens=visit.request.num_tokens,
            hit_tokens=tokens,
            ttft_s=visit.ttft_s,
            cold_s=self._cold[visit.number],
            reason="" if visit.plan is None else str(visit.plan.reason),
        )
        self._on_progress(len(self._records))


def _cold_ttfts(trace: Trace, machine: Machine) -> list[float]:
    """Return each request's time to first token without any cache."""
    prefill: PrefillModel = machine.prefill_model
    seconds = [prefill.seconds(request.num_tokens, 0) for request in trace.requests]
    if not machine.engines.count:
        return seconds
    free_s = deque([0.0] * machine.engines.count)
    found: list[float] = []
    for request, needed_s in zip(trace.requests, seconds, strict=True):
        at_s = request.at_ns / 1e9
        soonest_s = min(free_s)
        free_s.remove(soonest_s)
        end_s = max(at_s, soonest_s) + needed_s
        free_s.append(end_s)
        found.append(end_s - at_s)
    return found
