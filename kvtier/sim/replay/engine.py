"""Simulated engines of a timed replay, and the requests that they compute.

An engine computes one prompt after another, or all at once if requests do not wait for each other.
It reports step times and the outcomes of its decisions once per second, like a real one. A request
is looked up, loaded, computed and stored. If its plan is a split, the engine computes from the
front while blocks load from the back, claim by claim like the real engine, until both meet.
Otherwise it computes the rest after the load has ended.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvtier.core.identity import HASH_BYTES, split_hashes
from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
from kvtier.core.residency import TierName
from kvtier.engine.split import SplitProgress
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.replay.context import Pipe, ReplayContext
from kvtier.sim.replay.setup import traits_of

__all__ = ["ActiveLoad", "ReplayEngine", "ReplayRequest"]


_LOOKED_UP_MAX = 8
"""Requests looked up or loaded before their turn; later ones are only announced."""

_REPORT_S = 1.0


class ReplayEngine:
    """A simulated engine. ``is_shared``: requests wait for each other."""

    def __init__(self, context: ReplayContext, session: str, *, is_shared: bool) -> None:
        self.session = session
        self._context = context
        self._is_shared = is_shared
        self._prefill = context.machine.prefill_model
        self._pipe = Pipe(context.machine.cpu.latency_s)
        self._waiting: deque[ReplayRequest] = deque()
        self._open: list[ReplayRequest] = []
        """Requests that are looked up, loading, ready or computing, by arrival."""
        self._ready: deque[ReplayRequest] = deque()
        self._is_busy = False
        self._steps: list[StepSample] = []
        self._outcomes: list[PlanOutcome] = []
        self._is_report_due = False

    @property
    def num_waiting_tokens(self) -> int:
        """Return the number of tokens left to compute."""
        return sum(each.num_left for each in (*self._open, *self._waiting))

    def tokens_before(self, request: "ReplayRequest") -> int:
        """Return how many tokens are computed before those of an open request."""
        if not self._is_shared:
            return 0
        before = self._open[: self._open.index(request)]
        return sum(each.num_left for each in before)

    def take(self, request: "ReplayRequest") -> None:
        """Accept a new request."""
        if self._is_shared and len(self._open) >= _LOOKED_UP_MAX:
            self._waiting.append(request)
            request.announce()
        else:
            self._open.append(request)
            request.begin()

    def make_ready(self, request: "ReplayRequest") -> None:
        """Let a request compute when its turn comes."""
        if not self._is_shared:
            self._compute(request)
            return
        self._ready.append(request)
        self._go_on()

    def pipe(self) -> Pipe:
        """Return the link between arena and engine: one per request unless requests share it."""
        return self._pipe if self._is_shared else Pipe(self._context.machine.cpu.latency_s)

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Include the outcome of a decision in the next report."""
        self._outcomes.append(outcome)
        self._expect_report()

    def _go_on(self) -> None:
        if not self._is_busy and self._ready:
            self._is_busy = True
            self._compute(self._ready.popleft())

    def _compute(self, request: "ReplayRequest") -> None:
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

        self._context.after(sample.seconds, stepped)

    def _end(self, request: "ReplayRequest") -> None:
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
            self._context.after(_REPORT_S, self._report)

    def _report(self) -> None:
        self._is_report_due = False
        steps, outcomes = tuple(self._steps), tuple(self._outcomes)
        self._steps.clear()
        self._outcomes.clear()
        self._context.adapter.ask(
            lambda call: ev.EngineTierReport(
                call, self.session, 0, 0, 0, 0, steps=steps, outcomes=outcomes
            )
        )


class ActiveLoad:
    """A load in progress. ``ended`` is called once, when no more blocks will come."""

    def __init__(self, context: ReplayContext, pipe: Pipe, ended: Callable[[], None]) -> None:
        self.lease = 0
        self.tiers: list[TierName] = []
        """Tiers of the blocks that have arrived, in order."""
        self.is_over = False
        """The node announces no more blocks."""
        self._context = context
        self._pipe = pipe
        self._ended = ended
        self._num_announced = 0
        self._is_cancelled = False

    def announced(self, progress: ac.LoadUpdate) -> None:
        """Copy the announced blocks, and note the end."""
        self.lease = progress.lease
        self._num_announced += len(progress.tiers)
        self.is_over = bool(progress.end)
        if progress.tiers:
            self._copy(progress.tiers)
        elif self.is_over and self._is_complete:
            self._context.after(0.0, self._end)

    def cancel(self) -> None:
        """Accept no more blocks; ``ended`` is not called any more."""
        self._is_cancelled = True

    @property
    def _is_complete(self) -> bool:
        return len(self.tiers) == self._num_announced

    def _copy(self, tiers: Sequence[TierName]) -> None:
        """Copy blocks that were announced together, as one event."""
        link, now_ns = self._context.machine.cpu, self._context.now_ns
        num_bytes = len(tiers) * self._context.adapter.block_bytes
        done_ns = self._pipe.arrival_ns(now_ns, num_bytes / link.read_bytes_per_s)

        def copied() -> None:
            if self._is_cancelled:
                return
            self.tiers += tiers
            if self.is_over and self._is_complete:
                self._end()

        self._context.events.at(done_ns, copied)

    def _end(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._ended()


_LOOKUP_NS = 10**9
_WAIT_NS = 5 * 10**9
"""Longest wait for a load without a limit in its plan."""


class ReplayRequest:
    """A request of the trace. ``done`` is called with the first token."""

    def __init__(
        self,
        context: ReplayContext,
        engine: ReplayEngine,
        number: int,
        done: Callable[["ReplayRequest"], None],
    ) -> None:
        self.number = number
        self.request = request = context.trace.requests[number]
        self.hits: Counter[TierName] = Counter()
        """Restored blocks by tier."""
        self.plan: RestorePlan | None = None
        self.ttft_s = 0.0
        self._context = context
        self._engine = engine
        self._pipe = engine.pipe()
        self._done = done
        self._traits = traits_of(context.trace, number)
        self._hashes = context.trace.hashes(request.blocks)
        # The last token is always computed, since its result is the first output token.
        num_wanted = max(0, request.num_tokens - 1) // context.trace.block_tokens
        self._wanted = self._hashes[: num_wanted * HASH_BYTES]
        self._active_load: ActiveLoad | None = None
        self._num_planned = 0
        self._split = SplitProgress(0)
        """Progress of a load from the back."""
        self._front = 0
        """Leading tokens in place."""
        self._step = 0
        """Tokens being computed."""
        self._num_computed = 0
        self._compute_s = 0.0
        self._began_ns = self._asked_ns = self._loaded_ns = 0

    @property
    def num_left(self) -> int:
        """Return the number of tokens not in place; all of them while a load is open."""
        return self.request.num_tokens - self._front

    def announce(self) -> None:
        """Announce the request, which waits for its turn."""
        announced = ev.AnnouncedRequest(self._traits, self.request.tenant, self._wanted, 0)
        session = self._engine.session
        self._context.adapter.ask(lambda call: ev.Announce(call, session, (announced,)))

    def begin(self) -> None:
        """Look up after the time of a call; a prompt without a full block has no lookup."""
        self._began_ns = self._context.now_ns
        if self._wanted:
            self._context.after(self._context.machine.engines.call_s, self._look_up)
        else:
            self._engine.make_ready(self)

    def next_step(self) -> tuple[int, int] | None:
        """Return how many tokens to compute next and after how many; None when done.

        With a load from the back, a step is a batch of the claimed blocks.
        """
        end = self.request.num_tokens
        if self._active_load is not None:
            claimed = self._claim(self._active_load) * self._context.trace.block_tokens
            if self._front >= claimed:
                self._join_load(self._active_load)
            else:
                end = min(claimed, self._front + self._context.machine.engines.max_batch_tokens)
        self._step = end - self._front
        return (self._step, self._front) if self._step > 0 else None

    def _claim(self, active_load: ActiveLoad) -> int:
        """Return how many leading blocks the engine has claimed to compute."""
        split = self._split
        # Blocks that are already claimed do not count as loaded.
        split.num_loaded = min(len(active_load.tiers), split.num_blocks - split.num_claimed)
        if self._front >= split.num_claimed * self._context.trace.block_tokens:
            split.num_claimed = split.next_claim()
        return split.num_claimed

    def stepped(self, seconds: float) -> None:
        """Note that the current step is computed."""
        self._front += self._step
        self._num_computed += self._step
        self._compute_s += seconds

    def finish(self) -> None:
        """Return the first token, report the plan's outcome, and store what was computed."""
        context = self._context
        self.ttft_s = (context.now_ns - self.request.at_ns) / 1e9
        if self.plan is not None:
            outcome = PlanOutcome(
                decision=self.plan.decision,
                tiers=tuple(sorted(self.hits.items())),
                restore_s=max(0, self._loaded_ns - self._asked_ns) / 1e9,
                computed_tokens=self._num_computed,
                compute_s=self._compute_s,
                wait_s=max(0, self._began_ns - self.request.at_ns) / 1e9,
                ttft_s=self.ttft_s,
            )
            self._engine.note_outcome(outcome)
        self._done(self)
        self._store(0 if self.plan is not None and self.plan.is_split else self.hits.total())

    # Lookup and load

    def _look_up(self) -> None:
        context, session, wanted = self._context, self._engine.session, self._wanted
        context.adapter.ssd.touch(split_hashes(wanted))
        load = EngineLoad(waiting_tokens=self._engine.tokens_before(self))
        deadline_ns, tenant = context.now_ns + _LOOKUP_NS, self.request.tenant
        found = context.adapter.ask(
            lambda call: ev.Lookup(
                call, session, tenant, wanted, 0, deadline_ns, self._traits, load
            )
        )
        assert isinstance(found, ac.LookupResult), found
        self.plan = found.plan
        self._num_planned = found.num_blocks if found.plan is None else found.plan.num_blocks
        is_split = found.plan is not None and found.plan.is_split
        is_loading = self._num_planned > 0 and self._load(is_split=is_split)
        if is_split or not is_loading:
            self._engine.make_ready(self)

    def _load(self, *, is_split: bool) -> bool:
        """Load the planned blocks; False if the node refuses."""
        context, session, plan = self._context, self._engine.session, self.plan
        self._asked_ns = context.now_ns
        wait_ns = plan.wait_ns if plan is not None and plan.wait_ns else _WAIT_NS
        active_load = ActiveLoad(context, self._pipe, lambda: self._load_ended(is_split=is_split))
        load = ev.Load(
            call=0,
            session=session,
            tenant=self.request.tenant,
            hashes=self._wanted[: self._num_planned * HASH_BYTES],
            first=0,
            deadline_ns=context.now_ns + wait_ns,
            decision=0 if plan is None else plan.decision,
            from_back=is_split,
        )
        if context.adapter.listen(load, active_load.announced) is not None:
            return False
        self._active_load, self._split = active_load, SplitProgress(self._num_planned)
        context.tick_at(load.deadline_ns, lambda: active_load.is_over)
        return True

    def _load_ended(self, *, is_split: bool) -> None:
        """Continue with the loaded blocks; with a split, computing continues by itself."""
        active_load = self._active_load
        assert active_load is not None
        self._loaded_ns = self._context.now_ns
        if is_split:
            return
        self.hits.update(active_load.tiers)
        self._front = len(active_load.tiers) * self._context.trace.block_tokens
        self._release(active_load)
        self._engine.make_ready(self)

    def _join_load(self, active_load: ActiveLoad) -> None:
        """Use the blocks loaded from the back, except those that were computed too."""
        block_tokens = self._context.trace.block_tokens
        self._loaded_ns = self._loaded_ns or self._context.now_ns
        num_blocks = self._num_planned - -(-self._front // block_tokens)
        self.hits.update(active_load.tiers[: max(0, num_blocks)])
        self._front = max(self._front, self._num_planned * block_tokens)
        self._release(active_load)

    def _release(self, active_load: ActiveLoad) -> None:
        active_load.cancel()
        self._active_load = None
        session = self._engine.session
        self._context.adapter.ask(lambda call: ev.Release(call, session, active_load.lease))

    # Store

    def _store(self, first: int) -> None:
        """Store the blocks from ``first`` on; if throttled, the rest afterwards."""
        if first >= len(self._hashes) // HASH_BYTES:
            return
        context, session = self._context, self._engine.session
        granted = context.adapter.ask(
            lambda call: ev.PrepareStore(
                call, session, self.request.tenant, self._hashes, first, self._traits
            )
        )
        assert isinstance(granted, ac.StoreGrant), granted
        if not granted.lease:
            return
        num_bytes = len(granted.indexes) * context.adapter.block_bytes
        seconds = num_bytes / context.machine.cpu.write_bytes_per_s

        def copied() -> None:
            checksums = (bytes(16),) * len(granted.indexes)
            context.adapter.ask(
                lambda call: ev.CompleteStore(call, session, granted.lease, checksums)
            )
            if granted.rejected_blocks and granted.reason == "throttled":
                self._store(granted.indexes[-1] + 1)

        context.events.at(self._pipe.arrival_ns(context.now_ns, seconds), copied)
