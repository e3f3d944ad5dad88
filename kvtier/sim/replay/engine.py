"""A simulated engine: one prompt computed after the other, or all at once where none is to wait.

It reports what its steps took, and what came of its decisions, once a second, like a real one.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.core.identity import HASH_BYTES, split_hashes
from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
from kvtier.core.residency import TierName
from kvtier.engine.split import SplitProgress
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.replay.context import Pipe, ReplayContext
from kvtier.sim.replay.setup import traits_of

__all__ = ["ActiveLoad", "Computed", "ReplayEngine", "ReplayRequest"]


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

    def __init__(self, context: ReplayContext, session: str, *, is_shared: bool) -> None:
        self.session = session
        self._context = context
        self._is_shared = is_shared
        self._prefill = context.machine.prefill_model
        self._pipe = Pipe(context.machine.cpu.latency_s)
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
        return self._pipe if self._is_shared else Pipe(self._context.machine.cpu.latency_s)

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

        self._context.after(sample.seconds, stepped)

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
    """Blocks in the order of their coming; ``ended`` is called once, when no more will come."""

    def __init__(self, context: ReplayContext, pipe: Pipe, ended: Callable[[], None]) -> None:
        self.lease = 0
        self.tiers: list[TierName] = []
        """Of the blocks that are in place."""
        self.is_over = False
        """The node announces no more."""
        self._context = context
        self._pipe = pipe
        self._ended = ended
        self._num_announced = 0
        self._is_given_up = False

    def announced(self, progress: ac.LoadUpdate) -> None:
        """Copy what the node says is there, and note an end."""
        self.lease = progress.lease
        self._num_announced += len(progress.tiers)
        self.is_over = bool(progress.end)
        if progress.tiers:
            self._copy(progress.tiers)
        elif self.is_over and self._is_complete:
            self._context.after(0.0, self._end)

    def give_up(self) -> None:
        """Take nothing more in; ``ended`` is not called any more."""
        self._is_given_up = True

    @property
    def _is_complete(self) -> bool:
        return len(self.tiers) == self._num_announced

    def _copy(self, tiers: Sequence[TierName]) -> None:
        """Copy some blocks, as one step of the simulation: they were announced together."""
        link, now_ns = self._context.machine.cpu, self._context.now_ns
        num_bytes = len(tiers) * self._context.adapter.block_bytes
        done_ns = self._pipe.arrival_ns(now_ns, num_bytes / link.read_bytes_per_s)

        def copied() -> None:
            if self._is_given_up:
                return
            self.tiers += tiers
            if self.is_over and self._is_complete:
                self._end()

        self._context.events.at(done_ns, copied)

    def _end(self) -> None:
        if not self._is_given_up:
            self._is_given_up = True
            self._ended()


_LOOKUP_NS = 10**9
_WAIT_NS = 5 * 10**9
"""The longest wait for a load where no plan says less."""


class ReplayRequest:
    """See the module. ``done`` is called with the first token."""

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
        """Blocks that were restored and not computed."""
        self.plan: RestorePlan | None = None
        self.ttft_s = 0.0
        self._context = context
        self._engine = engine
        self._pipe = engine.pipe()
        self._done = done
        self._traits = traits_of(context.trace, number)
        self._hashes = context.trace.hashes(request.blocks)
        # The last token is always computed, since its result is the first one of the answer.
        num_wanted = max(0, request.num_tokens - 1) // context.trace.block_tokens
        self._wanted = self._hashes[: num_wanted * HASH_BYTES]
        self._active_load: ActiveLoad | None = None
        self._num_planned = 0
        self._meeting = SplitProgress(0)
        """Of a load from the back."""
        self._front = 0
        """Tokens from the first one on that are in place."""
        self._step = 0
        """Tokens being computed."""
        self._num_computed = 0
        self._compute_s = 0.0
        self._began_ns = self._asked_ns = self._loaded_ns = 0

    @property
    def num_left(self) -> int:
        """Return the tokens that are not in place; of a load not known yet it is all."""
        return self.request.num_tokens - self._front

    def announce(self) -> None:
        """Say that it waits for its turn."""
        announced = ev.AnnouncedRequest(self._traits, self.request.tenant, self._wanted, 0)
        session = self._engine.session
        self._context.adapter.ask(lambda call: ev.Announce(call, session, (announced,)))

    def begin(self) -> None:
        """Look up, a call's time later; what fills no block has nothing to ask for."""
        self._began_ns = self._context.now_ns
        if self._wanted:
            self._context.after(self._context.machine.engines.call_s, self._look_up)
        else:
            self._engine.make_ready(self)

    def next_step(self) -> tuple[int, int] | None:
        """Return the next tokens to compute: with a load from the back, a batch of its claim."""
        end = self.request.num_tokens
        if self._active_load is not None:
            claimed = self._claim(self._active_load) * self._context.trace.block_tokens
            if self._front >= claimed:
                self._meet(self._active_load)
            else:
                end = min(claimed, self._front + self._context.machine.engines.max_batch_tokens)
        self._step = end - self._front
        return (self._step, self._front) if self._step > 0 else None

    def _claim(self, active_load: ActiveLoad) -> int:
        """Return how many leading blocks are the engine's to compute; no more where both met."""
        meeting = self._meeting
        # What comes of blocks that are claimed already would not have been loaded.
        meeting.num_loaded = min(len(active_load.tiers), meeting.num_blocks - meeting.num_claimed)
        if self._front >= meeting.num_claimed * self._context.trace.block_tokens:
            meeting.num_claimed = meeting.next_claim()
        return meeting.num_claimed

    def stepped(self, seconds: float) -> None:
        """Note what is computed now."""
        self._front += self._step
        self._num_computed += self._step
        self._compute_s += seconds

    def finish(self) -> None:
        """Give the first token, say what came of the plan, and store what was computed."""
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
        """Ask for the planned blocks; False: it is refused."""
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
        self._active_load, self._meeting = active_load, SplitProgress(self._num_planned)
        context.tick_at(load.deadline_ns, lambda: active_load.is_over)
        return True

    def _load_ended(self, *, is_split: bool) -> None:
        """Go on with what has come; with a split, computing meets it by itself."""
        active_load = self._active_load
        assert active_load is not None
        self._loaded_ns = self._context.now_ns
        if is_split:
            return
        self.hits.update(active_load.tiers)
        self._front = len(active_load.tiers) * self._context.trace.block_tokens
        self._give_back(active_load)
        self._engine.make_ready(self)

    def _meet(self, active_load: ActiveLoad) -> None:
        """Take what came from the back, but for the blocks that were computed too."""
        block_tokens = self._context.trace.block_tokens
        self._loaded_ns = self._loaded_ns or self._context.now_ns
        num_blocks = self._num_planned - -(-self._front // block_tokens)
        self.hits.update(active_load.tiers[: max(0, num_blocks)])
        self._front = max(self._front, self._num_planned * block_tokens)
        self._give_back(active_load)

    def _give_back(self, active_load: ActiveLoad) -> None:
        active_load.give_up()
        self._active_load = None
        session = self._engine.session
        self._context.adapter.ask(lambda call: ev.Release(call, session, active_load.lease))

    # Store

    def _store(self, first: int) -> None:
        """Offer the blocks from one on; what the way has no room for yet, after the others."""
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
