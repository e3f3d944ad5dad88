"""One request's way through a replay with time: looked up, loaded, computed, stored.

With a plan that splits, the engine computes from the front while blocks come from the back, claim
by claim like the real one, until it meets them. Else it computes what is left once the load has
ended.
"""

from collections import Counter
from collections.abc import Callable

from kvtier.core.cost.sample import EngineLoad
from kvtier.core.identity import HASH_BYTES, split_hashes
from kvtier.core.plan import PlanOutcome, RestorePlan
from kvtier.core.residency import TierName
from kvtier.engine.meeting import Meeting
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.sim.replay.engine import ReplayEngine
from kvtier.sim.replay.incoming import Incoming
from kvtier.sim.replay.scene import Scene
from kvtier.sim.replay.setup import traits_of

__all__ = ["Visit"]

_LOOKUP_NS = 10**9
_WAIT_NS = 5 * 10**9
"""The longest wait for a load where no plan says less."""


class Visit:
    """See the module. ``done`` is called with the first token."""

    def __init__(
        self, scene: Scene, engine: ReplayEngine, number: int, done: Callable[["Visit"], None]
    ) -> None:
        self.number = number
        self.request = request = scene.trace.requests[number]
        self.hits: Counter[TierName] = Counter()
        """Blocks that were restored and not computed."""
        self.plan: RestorePlan | None = None
        self.ttft_s = 0.0
        self._scene = scene
        self._engine = engine
        self._pipe = engine.pipe()
        self._done = done
        self._traits = traits_of(scene.trace, number)
        self._hashes = scene.trace.hashes(request.blocks)
        # The last token is always computed, since its result is the first one of the answer.
        num_wanted = max(0, request.num_tokens - 1) // scene.trace.block_tokens
        self._wanted = self._hashes[: num_wanted * HASH_BYTES]
        self._incoming: Incoming | None = None
        self._num_planned = 0
        self._meeting = Meeting(0)
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
        announced = ev.Announced(self._traits, self.request.tenant, self._wanted, 0)
        session = self._engine.session
        self._scene.desk.ask(lambda call: ev.Announce(call, session, (announced,)))

    def begin(self) -> None:
        """Look up, a call's time later; what fills no block has nothing to ask for."""
        self._began_ns = self._scene.now_ns
        if self._wanted:
            self._scene.after(self._scene.machine.engines.call_s, self._look_up)
        else:
            self._engine.make_ready(self)

    def next_step(self) -> tuple[int, int] | None:
        """Return the next tokens to compute: with a load from the back, a batch of its claim."""
        end = self.request.num_tokens
        if self._incoming is not None:
            claimed = self._claim(self._incoming) * self._scene.trace.block_tokens
            if self._front >= claimed:
                self._meet(self._incoming)
            else:
                end = min(claimed, self._front + self._scene.machine.engines.max_batch_tokens)
        self._step = end - self._front
        return (self._step, self._front) if self._step > 0 else None

    def _claim(self, incoming: Incoming) -> int:
        """Return how many leading blocks are the engine's to compute; no more where both met."""
        meeting = self._meeting
        # What comes of blocks that are claimed already would not have been loaded.
        meeting.num_loaded = min(len(incoming.tiers), meeting.num_blocks - meeting.num_claimed)
        if self._front >= meeting.num_claimed * self._scene.trace.block_tokens:
            meeting.num_claimed = meeting.next_claim()
        return meeting.num_claimed

    def stepped(self, seconds: float) -> None:
        """Note what is computed now."""
        self._front += self._step
        self._num_computed += self._step
        self._compute_s += seconds

    def finish(self) -> None:
        """Give the first token, say what came of the plan, and store what was computed."""
        scene = self._scene
        self.ttft_s = (scene.now_ns - self.request.at_ns) / 1e9
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
        scene, session, wanted = self._scene, self._engine.session, self._wanted
        scene.desk.shelf.touch(split_hashes(wanted))
        load = EngineLoad(waiting_tokens=self._engine.tokens_before(self))
        deadline_ns, tenant = scene.now_ns + _LOOKUP_NS, self.request.tenant
        found = scene.desk.ask(
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
        scene, session, plan = self._scene, self._engine.session, self.plan
        self._asked_ns = scene.now_ns
        wait_ns = plan.wait_ns if plan is not None and plan.wait_ns else _WAIT_NS
        incoming = Incoming(scene, self._pipe, lambda: self._load_ended(is_split=is_split))
        load = ev.Load(
            call=0,
            session=session,
            tenant=self.request.tenant,
            hashes=self._wanted[: self._num_planned * HASH_BYTES],
            first=0,
            deadline_ns=scene.now_ns + wait_ns,
            decision=0 if plan is None else plan.decision,
            from_back=is_split,
        )
        if scene.desk.listen(load, incoming.announced) is not None:
            return False
        self._incoming, self._meeting = incoming, Meeting(self._num_planned)
        scene.tick_at(load.deadline_ns, lambda: incoming.is_over)
        return True

    def _load_ended(self, *, is_split: bool) -> None:
        """Go on with what has come; with a split, computing meets it by itself."""
        incoming = self._incoming
        assert incoming is not None
        self._loaded_ns = self._scene.now_ns
        if is_split:
            return
        self.hits.update(incoming.tiers)
        self._front = len(incoming.tiers) * self._scene.trace.block_tokens
        self._give_back(incoming)
        self._engine.make_ready(self)

    def _meet(self, incoming: Incoming) -> None:
        """Take what came from the back, but for the blocks that were computed too."""
        block_tokens = self._scene.trace.block_tokens
        self._loaded_ns = self._loaded_ns or self._scene.now_ns
        num_blocks = self._num_planned - -(-self._front // block_tokens)
        self.hits.update(incoming.tiers[: max(0, num_blocks)])
        self._front = max(self._front, self._num_planned * block_tokens)
        self._give_back(incoming)

    def _give_back(self, incoming: Incoming) -> None:
        incoming.give_up()
        self._incoming = None
        session = self._engine.session
        self._scene.desk.ask(lambda call: ev.Release(call, session, incoming.lease))

    # Store

    def _store(self, first: int) -> None:
        """Offer the blocks from one on; what the way has no room for yet, after the others."""
        if first >= len(self._hashes) // HASH_BYTES:
            return
        scene, session = self._scene, self._engine.session
        granted = scene.desk.ask(
            lambda call: ev.PrepareStore(
                call, session, self.request.tenant, self._hashes, first, self._traits
            )
        )
        assert isinstance(granted, ac.Granted), granted
        if not granted.lease:
            return
        num_bytes = len(granted.indexes) * scene.desk.block_bytes
        seconds = num_bytes / scene.machine.cpu.write_bytes_per_s

        def copied() -> None:
            checksums = (bytes(16),) * len(granted.indexes)
            scene.desk.ask(lambda call: ev.CompleteStore(call, session, granted.lease, checksums))
            if granted.rejected_blocks and granted.reason == "throttled":
                self._store(granted.indexes[-1] + 1)

        scene.agenda.at(self._pipe.carry_ns(scene.now_ns, seconds), copied)
