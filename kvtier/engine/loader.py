"""Lookups and loads in flight: brings blocks from the tiers below into the pool.

Rules
-----
* A load only writes to its own blocks: if the port's first block begins within the GPU's hit, its
  leading engine blocks go to spare blocks, which are released afterwards.
* The load holds one reference to each of its blocks until ``LoadEnded``, whatever happens to the
  request meanwhile.
* Reported blocks are published at once; all others are garbage, except those that the engine has
  claimed (see ``split``) and computes itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.core.plan import EngineLoad, PlanReason
from kvtier.core.residency import TierName
from kvtier.engine.pool import BlockPool
from kvtier.engine.port import KVPort, LoadEnded, LoadOrder, LoadProgress, PortLookup
from kvtier.engine.request import DecisionReason, RestoreDecision
from kvtier.engine.sequence import LoadedTail, Phase, Sequence
from kvtier.engine.split import SplitProgress

__all__ = ["Loader"]

_LOOKUPS_MAX = 2
"""Lookups per request: a second one in case the GPU lost the blocks before the found ones."""

_PLAN_REASONS: Mapping[PlanReason, DecisionReason] = {
    PlanReason.PART: DecisionReason.PART,
    PlanReason.SPLIT: DecisionReason.PART,
    PlanReason.COST: DecisionReason.COST,
    PlanReason.RISK: DecisionReason.RISK,
    PlanReason.GUARD: DecisionReason.GUARD,
    PlanReason.LIMIT: DecisionReason.MAX_LOAD_TOKENS,
    PlanReason.NEVER: DecisionReason.NEVER,
}
"""Reasons for which a plan loads less than was found; with any other it loads everything."""


@dataclass(slots=True)
class _Load:
    sequence: Sequence
    first: int
    """Index in the port's chain."""
    into: list[list[int]]
    whole_reason: str
    """Why no more than this was requested; empty if it includes every missing full block."""
    split: SplitProgress | None
    """Progress of a load from the back, else None."""
    tiers: tuple[TierName, ...] = field(default=())
    """Sources of the blocks in place so far, in the load's order."""
    is_wanted: bool = True
    """Whether its sequence still has the blocks."""

    def place(self, number: int) -> int:
        """Return the index of the block that comes after ``number`` others."""
        return number if self.split is None else len(self.into) - 1 - number


class Loader:
    """Asks the port, gives it blocks to fill, and publishes the filled ones."""

    def __init__(self, pool: BlockPool, port: KVPort) -> None:
        self._pool = pool
        self._port = port
        self._ratio = port.block_tokens // pool.shape.block_tokens
        self._lookups: dict[str, Sequence] = {}
        self._loads: dict[str, _Load] = {}

    @property
    def num_open(self) -> int:
        """Return the number of lookups and loads in flight."""
        return len(self._lookups) + len(self._loads)

    @property
    def waits_for(self) -> str:
        """Return what the engine waits for: ``load``, else ``lookup``, else nothing."""
        if self._loads:
            return "load"
        return "lookup" if self._lookups else ""

    @property
    def num_reserved(self) -> int:
        """Return the number of the pool's blocks reserved for sequences with a lookup in flight."""
        return sum(sequence.num_reserved for sequence in self._lookups.values())

    def has(self, request_id: str) -> bool:
        """Return whether a request has a lookup or load in flight, even if it has ended."""
        return request_id in self._lookups or request_id in self._loads

    # Lookups

    def wants_lookup(self, sequence: Sequence, num_hit: int) -> bool:
        """Return whether to look up blocks that the GPU lacks after ``num_hit`` engine blocks."""
        first = num_hit // self._ratio
        if first >= self._end(sequence):
            decision = RestoreDecision.GPU_HIT if num_hit else RestoreDecision.COMPUTED
            sequence.decide(decision, DecisionReason.TOO_SHORT)
            return False
        if self._load_limit(sequence) == 0:
            sequence.decide(RestoreDecision.COMPUTED, DecisionReason.MAX_LOAD_TOKENS)
            return False
        is_known = sequence.found is not None and sequence.found_first <= first
        return not is_known and sequence.num_lookups < _LOOKUPS_MAX

    def look_up(self, sequence: Sequence, num_hit: int, load: EngineLoad) -> None:
        """Look up the blocks that the GPU lacks after ``num_hit`` engine blocks."""
        first = num_hit // self._ratio
        sequence.num_lookups += 1
        sequence.found_first = first
        sequence.found = None
        sequence.phase = Phase.LOOKING
        self._lookups[sequence.request_id] = sequence
        self._port.lookup(sequence.chain_below(self._end(sequence)), first, sequence.traits, load)

    def found(self, event: PortLookup) -> Sequence | None:
        """Take a lookup's answer; returns the sequence if it still waits for it."""
        sequence = self._lookups.pop(event.request_id)
        if sequence.phase is not Phase.LOOKING:
            return None
        sequence.found = event
        sequence.plan = event.plan
        sequence.advised_offload_tokens = event.max_offload_tokens
        return sequence

    def num_loadable(self, sequence: Sequence, num_hit: int) -> int:
        """Return how many blocks to load after ``num_hit`` engine blocks."""
        num_left = self._num_left(sequence, num_hit // self._ratio)
        return max(0, min(num_left, self._load_limit(sequence)))

    def num_spare(self, num_hit: int) -> int:
        """Return the engine blocks that a load needs besides those of its sequence."""
        return num_hit % self._ratio

    def decide_computed(self, sequence: Sequence, reason: str = "") -> None:
        """Note that nothing will be loaded, for this reason or the lookup's."""
        found = sequence.found
        limit = _limit_reason(found) if found is not None else DecisionReason.OTHER
        sequence.decide(RestoreDecision.COMPUTED, reason or limit)
        sequence.found = None

    # Loads

    def load(self, sequence: Sequence, num_hit: int, num_blocks: int, spare: list[int]) -> None:
        """Load ``num_blocks`` blocks into the sequence's own; in a split, it computes meanwhile."""
        found = sequence.found
        assert found is not None
        first = num_hit // self._ratio
        start = first * self._ratio
        end = start + num_blocks * self._ratio
        own = sequence.blocks[num_hit:end]
        self._pool.retain(own)
        flat = spare + own  # the spare ones already have the load's reference
        into = [flat[i : i + self._ratio] for i in range(0, len(flat), self._ratio)]
        assert len(into) == num_blocks
        reason = _limit_reason(found)
        if first + num_blocks == self._end(sequence):
            reason = ""
        elif num_blocks < self._num_left(sequence, first):
            reason = DecisionReason.MAX_LOAD_TOKENS
        plan = found.plan
        is_split = plan is not None and plan.is_split
        split = SplitProgress(num_blocks) if is_split else None
        self._loads[sequence.request_id] = _Load(sequence, first, into, reason, split)
        sequence.found = None
        sequence.phase = Phase.RUNNING if is_split else Phase.LOADING
        if is_split:
            end_token = (first + num_blocks) * self._port.block_tokens
            sequence.loaded_tail = LoadedTail(end_token, end_token)
        order = LoadOrder(
            sequence.request_id,
            sequence.chain_below(first + num_blocks),
            first,
            decision=plan.decision if plan is not None else 0,
            from_back=is_split,
            wait_ns=plan.wait_ns if plan is not None else 0,
        )
        self._port.load(order, into)

    def num_computable(self, sequence: Sequence) -> int:
        """Return how many tokens may be computed next: those that no load may still write to."""
        loaded_tail = sequence.loaded_tail
        if loaded_tail is None:
            return sequence.num_missing
        load = self._loads.get(sequence.request_id)
        if load is None or load.split is None:
            return loaded_tail.start - sequence.num_computed
        split = load.split
        if self._claimed_end(load) <= sequence.num_computed:
            granted = self._port.claim(sequence.request_id, split.next_claim())
            split.num_claimed = max(split.num_claimed, granted)
            assert split.gap >= 0, "a loaded block must not be granted"
        return max(0, self._claimed_end(load) - sequence.num_computed)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence skip its loaded tail, if it has computed everything before it."""
        if not sequence.join():
            return
        load = self._loads.get(sequence.request_id)
        if load is not None:  # otherwise the end of the load has decided
            _decide(load, "met")

    def loaded(self, event: LoadProgress, now_ns: int) -> None:
        """Take the new blocks of a load."""
        self._take_in(self._loads[event.request_id], event.tiers, now_ns)

    def ended(self, event: LoadEnded, now_ns: int) -> Sequence | None:
        """Take the last blocks of a load, and release its references.

        Returns the sequence if it waited for this.
        """
        load = self._loads[event.request_id]
        self._take_in(load, event.tiers, now_ns)
        del self._loads[event.request_id]
        self._pool.release([block for blocks in load.into for block in blocks])
        sequence = load.sequence
        if not load.is_wanted:
            return None
        _decide(load, event.reason)
        if load.split is None:
            return sequence
        if (
            sequence.loaded_tail is not None
            and sequence.loaded_tail.start == sequence.loaded_tail.end
        ):
            sequence.loaded_tail = None
        return None

    def cancel(self, sequence: Sequence) -> None:
        """Cancel the lookup or load of a sequence."""
        request_id = sequence.request_id
        if request_id in self._loads:
            self._loads[request_id].is_wanted = False
        if self.has(request_id):
            self._port.cancel(request_id)

    def check(self) -> None:
        """Check that loads agree with their sequences; raises AssertionError."""
        for load in self._loads.values():
            split, loaded_tail = load.split, load.sequence.loaded_tail
            if not load.is_wanted:
                continue
            if split is None:
                assert load.sequence.phase is Phase.LOADING, (
                    "a load from the front must be waited for"
                )
                continue
            assert load.sequence.phase is Phase.RUNNING, "during a split the sequence must run"
            assert split.num_loaded == len(load.tiers), "loaded blocks must be counted"
            assert split.gap >= 0, "a block is both claimed and loaded"
            claimed_end = self._claimed_end(load)
            is_claimed = split.num_claimed == 0 or load.sequence.num_computed <= claimed_end
            assert loaded_tail is None or is_claimed, "only claimed blocks may be computed"
            if loaded_tail is not None:
                num_back = (loaded_tail.end - loaded_tail.start) // self._port.block_tokens
                assert num_back == len(load.tiers), "the loaded tail must be what was loaded"

    def _take_in(self, load: _Load, tiers: tuple[TierName, ...], now_ns: int) -> None:
        """Publish the new blocks of a load."""
        num_known = len(load.tiers)
        assert num_known <= len(tiers) <= len(load.into), "a load grows, up to what was requested"
        load.tiers = tiers
        if load.split is not None:
            load.split.num_loaded = len(tiers)
            assert load.split.gap >= 0, "the port must not write to claimed blocks"
        sequence, size = load.sequence, self._port.block_tokens
        for number in range(num_known, len(tiers)):
            place = load.place(number)
            self._publish(load, place)
            if load.is_wanted:
                start = (load.first + place) * size
                sequence.sources.count(tiers[number], start, start + size)
        if load.is_wanted and len(tiers) > num_known:
            sequence.num_loaded += len(tiers) - num_known
            sequence.timing.note_restored(tiers[num_known:], now_ns)
            self._extend(load)

    def _publish(self, load: _Load, place: int) -> None:
        chain = load.sequence.chain
        first = (load.first + place) * self._ratio
        for index, block in enumerate(load.into[place], first):
            self._pool.publish(block, chain.hashes[index], chain.parent(index))
            self._pool.mark(block)  # the tiers below hold it

    def _extend(self, load: _Load) -> None:
        """Update the progress of the sequence's load."""
        sequence = load.sequence
        if load.split is None:
            end = (load.first + len(load.tiers)) * self._ratio
            computed = end * self._pool.shape.block_tokens
            sequence.num_computed = max(sequence.num_computed, computed)
            sequence.num_published = max(sequence.num_published, end)
        elif sequence.loaded_tail is not None:
            num_left = len(load.into) - len(load.tiers)
            sequence.loaded_tail.start = (load.first + num_left) * self._port.block_tokens
            self.join(sequence)

    def _claimed_end(self, load: _Load) -> int:
        """Return the token before which a load from the back will not write."""
        assert load.split is not None
        return (load.first + load.split.num_claimed) * self._port.block_tokens

    def _end(self, sequence: Sequence) -> int:
        """Return the number of full blocks worth loading: the last token is always computed."""
        return (len(sequence.tokens) - 1) // self._port.block_tokens

    def _load_limit(self, sequence: Sequence) -> int:
        """Return how many more blocks the request may load."""
        most = sequence.request.max_load_tokens
        limit = self._end(sequence) if most is None else most // self._port.block_tokens
        return max(0, limit - sequence.num_loaded)

    def _num_left(self, sequence: Sequence, first: int) -> int:
        """Return how many of the found blocks from ``first`` on the plan would load."""
        found = sequence.found
        if found is None or sequence.found_first > first:
            return 0
        num_planned = len(found.tiers)
        if found.plan is not None:
            num_planned = min(num_planned, found.plan.num_blocks)
        return sequence.found_first + num_planned - first


def _limit_reason(found: PortLookup) -> str:
    """Return why the plan loads no more blocks, or why no more were found."""
    plan = found.plan
    if plan is not None and plan.num_blocks < len(found.tiers):
        return _PLAN_REASONS.get(plan.reason, DecisionReason.OTHER)
    return found.reason


def _decide(load: _Load, reason: str) -> None:
    """Note the decision that results from a finished load."""
    decide = load.sequence.decide
    if len(load.tiers) == len(load.into):
        decision = RestoreDecision.LOADED_PART if load.whole_reason else RestoreDecision.LOADED
        decide(decision, load.whole_reason or DecisionReason.COMPLETE)
        return
    decision = RestoreDecision.LOADED_PART if load.tiers else RestoreDecision.COMPUTED
    decide(decision, DecisionReason.SPLIT if reason == "met" else reason)
