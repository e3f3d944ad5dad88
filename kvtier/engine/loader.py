"""Lookups and loads in flight: what the tiers below bring into the pool.

Rules
-----
* A load writes to blocks of its own only: where a block below begins inside what the GPU holds
  already, its first engine blocks go to spare ones, which are let go of afterwards.
* Each of its blocks has one reference of the load until ``LoadEnded``, whatever becomes of the
  request meanwhile.
* What the port reports is published at once; all else in the blocks is garbage.
"""

from dataclasses import dataclass

from kvtier.core.cost.sample import EngineLoad
from kvtier.core.traits import Traits
from kvtier.engine.pool import BlockPool
from kvtier.engine.port import Chain, Found, KVPort, Loaded, LoadEnded, LoadOrder
from kvtier.engine.request import Decision, DecisionReason
from kvtier.engine.sequence import Phase, Sequence

__all__ = ["Loader"]

_LOOKUPS_MAX = 2
"""Per request: once, and once more if the GPU lost the blocks before the found ones meanwhile."""


@dataclass(slots=True)
class _Load:
    sequence: Sequence
    first: int
    """In blocks of the port's chain."""
    into: list[list[int]]
    is_whole: bool
    """Every full block that was missing is asked for."""
    limit_reason: str
    """Why not, otherwise."""


class Loader:
    """Asks the port, hands it blocks to fill, and publishes what it filled."""

    def __init__(self, pool: BlockPool, port: KVPort) -> None:
        self._pool = pool
        self._port = port
        self._ratio = port.block_tokens // pool.shape.block_tokens
        self._lookups: dict[str, Sequence] = {}
        self._loads: dict[str, _Load] = {}

    @property
    def num_loads(self) -> int:
        """Return the loads in flight."""
        return len(self._loads)

    @property
    def num_open(self) -> int:
        """Return the lookups and loads in flight."""
        return len(self._lookups) + len(self._loads)

    @property
    def num_reserved(self) -> int:
        """Return the pool's blocks that those who look up were promised."""
        return sum(sequence.num_reserved for sequence in self._lookups.values())

    def has(self, request_id: str) -> bool:
        """Tell whether something of this name is in flight, also of a request that is gone."""
        return request_id in self._lookups or request_id in self._loads

    def look_up(self, sequence: Sequence, num_hit: int) -> bool:
        """Ask for what the GPU lacks after ``num_hit`` engine blocks; False: there is no need."""
        first, end = num_hit // self._ratio, self._end(sequence)
        if first >= end:
            decision = Decision.GPU_HIT if num_hit else Decision.COMPUTED
            sequence.decide(decision, DecisionReason.TOO_SHORT)
            return False
        if self._load_limit(sequence) == 0:
            sequence.decide(Decision.COMPUTED, DecisionReason.MAX_LOAD_TOKENS)
            return False
        is_known = sequence.found is not None and sequence.found_first <= first
        if is_known or sequence.num_lookups >= _LOOKUPS_MAX:
            return False
        sequence.num_lookups += 1
        sequence.found_first = first
        sequence.found = None
        sequence.phase = Phase.LOOKING
        self._lookups[sequence.request_id] = sequence
        traits = Traits(request_id=sequence.request_id, num_tokens=sequence.num_prompt)
        self._port.lookup(self._chain(sequence), first, traits, EngineLoad())
        return True

    def found(self, event: Found) -> Sequence | None:
        """Take a lookup's answer; returns the sequence if it still wants one."""
        sequence = self._lookups.pop(event.request_id)
        if sequence.phase is not Phase.LOOKING:
            return None
        sequence.found = event
        return sequence

    def num_loadable(self, sequence: Sequence, num_hit: int) -> int:
        """Return how many found blocks there are to load after ``num_hit`` engine blocks."""
        if sequence.found is None or sequence.found_first > num_hit // self._ratio:
            return 0
        num_found = sequence.found_first + len(sequence.found.tiers) - num_hit // self._ratio
        return max(0, min(num_found, self._load_limit(sequence)))

    def num_spare(self, num_hit: int) -> int:
        """Return the engine blocks a load needs besides those of its sequence."""
        return num_hit % self._ratio

    def decide_computed(self, sequence: Sequence, reason: str = "") -> None:
        """Note that nothing will be loaded, for this reason or the lookup's."""
        found = sequence.found.reason if sequence.found is not None else DecisionReason.OTHER
        sequence.decide(Decision.COMPUTED, reason or found)
        sequence.found = None

    def load(self, sequence: Sequence, num_hit: int, num_blocks: int, spare: list[int]) -> None:
        """Have the first ``num_blocks`` found blocks loaded into the sequence's blocks."""
        assert sequence.found is not None
        first = num_hit // self._ratio
        start = first * self._ratio
        end = start + num_blocks * self._ratio
        own = sequence.blocks[num_hit:end]
        self._pool.retain(own)
        flat = spare + own  # the spare ones came with the load's reference
        into = [flat[i : i + self._ratio] for i in range(0, len(flat), self._ratio)]
        assert len(into) == num_blocks
        num_found = sequence.found_first + len(sequence.found.tiers) - first
        is_whole = first + num_blocks == self._end(sequence)
        reason = sequence.found.reason
        if num_found > num_blocks:
            reason = DecisionReason.MAX_LOAD_TOKENS
        self._loads[sequence.request_id] = _Load(sequence, first, into, is_whole, reason)
        sequence.found = None
        sequence.phase = Phase.LOADING
        self._port.load(LoadOrder(sequence.request_id, self._chain(sequence), first), into)

    def loaded(self, event: Loaded) -> None:
        """Publish the leading blocks of a load that are in place."""
        self._publish(self._loads[event.request_id], event.num_blocks)

    def ended(self, event: LoadEnded) -> Sequence | None:
        """Publish what came, let go of the blocks; returns the sequence if it is still there."""
        load = self._loads.pop(event.request_id)
        sequence, num_blocks = load.sequence, len(event.tiers)
        self._publish(load, num_blocks)
        self._pool.release([block for blocks in load.into for block in blocks])
        if sequence.phase is not Phase.LOADING:
            return None
        sequence.num_loaded += num_blocks
        for index, tier in enumerate(event.tiers, start=load.first + 1):
            sequence.account.count(tier, index * self._port.block_tokens)
        if num_blocks == len(load.into):
            decision = Decision.LOADED if load.is_whole else Decision.LOADED_PART
            sequence.decide(decision, load.limit_reason)
        else:
            sequence.decide(Decision.LOADED_PART if num_blocks else Decision.COMPUTED, event.reason)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Say that a sequence does not want its lookup or load any more."""
        if self.has(sequence.request_id):
            self._port.cancel(sequence.request_id)

    def _publish(self, load: _Load, num_blocks: int) -> None:
        """Publish blocks of a load, and mark them: the tiers below have them already."""
        assert num_blocks <= len(load.into), "the port reports what it was asked for"
        chain = load.sequence.chain
        start = load.first * self._ratio
        for offset, block in enumerate(b for blocks in load.into[:num_blocks] for b in blocks):
            index = start + offset
            self._pool.publish(block, chain.hashes[index], chain.parent(index))
            self._pool.mark(block)
        end = start + num_blocks * self._ratio
        if load.sequence.phase is Phase.LOADING:
            computed = end * self._pool.shape.block_tokens
            load.sequence.num_computed = max(load.sequence.num_computed, computed)
            load.sequence.num_published = max(load.sequence.num_published, end)

    def _end(self, sequence: Sequence) -> int:
        """Return the full blocks worth loading: the last token is always computed."""
        return (len(sequence.tokens) - 1) // self._port.block_tokens

    def _load_limit(self, sequence: Sequence) -> int:
        """Return how many more blocks the request may load."""
        most = sequence.request.max_load_tokens
        limit = self._end(sequence) if most is None else most // self._port.block_tokens
        return max(0, limit - sequence.num_loaded)

    def _chain(self, sequence: Sequence) -> Chain:
        hashes = tuple(sequence.port_chain.hashes[: self._end(sequence)])
        return Chain(sequence.tenant, sequence.port_chain.root, hashes)
