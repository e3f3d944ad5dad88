"""Decides which sequences compute in each step, and on which blocks.

Theory
------
In each step, every decoding sequence gets one token, then prompts get the rest of the step's
budget, in order of arrival. A waiting request is admitted when the pool has room for all its
tokens, longest cached prefix first, so that shared prefixes are used while they are cached;
requests that have waited longer than the age cap go first.

Single flight: a request announces the blocks that it will compute or load. Another request whose
next missing block is announced waits for that block and then hits it. Deadlocks are impossible,
because a block that a request waits for comes earlier in the chain than all it announced itself.

Split: a sequence whose plan says so computes from the front while its blocks are loaded from the
back. It only computes what its loader has claimed for it, and skips the loaded blocks when it
reaches them.

When the pool is full, the latest arrival is preempted: it returns its blocks and waits again. The
earliest request is never preempted, so it finishes, and then so does each later one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad
from kvtier.core.residency import TierName
from kvtier.engine.loader import Loader
from kvtier.engine.offload import Offload
from kvtier.engine.pool import BlockPool
from kvtier.engine.port import KVPort, LoadEnded, LoadProgress, PortEvent, PortLookup, StoreEnded
from kvtier.engine.request import DecisionReason
from kvtier.engine.sequence import Phase, Sequence
from kvtier.engine.settings import EngineSettings

__all__ = ["ScheduledChunk", "Scheduler"]

_ORDERED_MAX = 256
"""Oldest waiting requests that are sorted in each step; more would take milliseconds."""


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """What one sequence computes in a step: its next ``num_tokens`` tokens."""

    sequence: Sequence
    num_tokens: int

    @property
    def is_decode(self) -> bool:
        """Return whether the chunk is the last generated token and not part of a prompt."""
        return self.num_tokens == 1 and self.sequence.num_generated > 0

    @property
    def is_last(self) -> bool:
        """Return whether no known tokens remain afterwards, so the next one can be chosen."""
        return self.num_tokens == self.sequence.num_missing


class Scheduler:
    """The requests in the engine, their blocks, and their loads and stores."""

    def __init__(self, settings: EngineSettings, pool: BlockPool, port: KVPort) -> None:
        self._settings = settings
        self._pool = pool
        self._port = port
        self.loader = Loader(pool, port)
        self.offload = Offload(pool, port)
        self.sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._announced: dict[BlockHash, Sequence] = {}
        self.num_preemptions = 0

    # Requests

    def add(self, sequence: Sequence) -> None:
        """Add a request to the waiting ones."""
        assert sequence.request_id not in self.sequences, "request ids must be unique"
        self.sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a request and free its blocks, except those that a load or store still holds."""
        self.loader.cancel(sequence)
        for queue in (self._waiting, self._running):
            if sequence in queue:
                queue.remove(sequence)
        self._let_go(sequence)
        sequence.phase = Phase.ENDED
        del self.sequences[sequence.request_id]

    def count(self, *phases: Phase) -> int:
        """Return the number of requests in these phases; from any thread."""
        # Copy to a list, atomically: the engine's thread changes the dictionary meanwhile.
        return sum(sequence.phase in phases for sequence in list(self.sequences.values()))

    @property
    def num_waiting(self) -> int:
        """Return the number of requests waiting for admission, or for readmission."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Return whether there is nothing to do and nothing in flight."""
        return not (self.sequences or self.loader.num_open or self.offload.num_open)

    # Each step: poll, admit, plan; then complete what was computed

    def poll(self, now_ns: int) -> bool:
        """Process the port's events; returns whether there were any."""
        events = self._port.poll()
        for event in events:
            self._take(event, now_ns)
        return bool(events)

    def _take(self, event: PortEvent, now_ns: int) -> None:
        match event:
            case PortLookup():
                sequence = self.loader.found(event)
                if sequence is not None:
                    self._queue(sequence, now_ns)
            case LoadProgress():
                self.loader.loaded(event, now_ns)
            case LoadEnded():
                sequence = self.loader.ended(event, now_ns)
                if sequence is not None:
                    sequence.phase = Phase.RUNNING
                    self._running.append(sequence)
            case StoreEnded():
                self.offload.stored(event)

    def admit(self, now_ns: int) -> bool:
        """Start waiting requests while there is room; returns whether any was started."""
        num_started = 0
        if not self._waiting or self._num_active >= self._settings.max_num_sequences:
            return False
        for sequence in self._in_order(now_ns):
            if self._num_active >= self._settings.max_num_sequences:
                break
            if self.loader.has(sequence.request_id) or self._is_in_flight(sequence):
                continue  # the load of a preempted request ends first
            if not self._start(sequence, now_ns):
                break  # no overtaking: otherwise a long prompt would never fit
            num_started += 1
        return num_started > 0

    def plan(self, now_ns: int) -> list[ScheduledChunk]:
        """Return what to compute now, with blocks for each sequence; preempts if necessary."""
        budget = self._settings.max_batch_tokens
        chunks: list[ScheduledChunk] = []
        running = sorted(self._running, key=lambda sequence: sequence.ticket)
        for sequence in running:
            # A sequence that lost its blocks to an earlier one in this loop no longer runs.
            is_next = sequence.num_missing == 1 and sequence.phase is Phase.RUNNING and budget
            if is_next and self._grow(sequence, now_ns):
                chunks.append(ScheduledChunk(sequence, 1))
                budget -= 1
        for sequence in running:
            if sequence.num_missing > 1 and sequence.phase is Phase.RUNNING and budget:
                num_tokens = min(budget, self.loader.num_computable(sequence))
                if num_tokens:
                    chunks.append(ScheduledChunk(sequence, num_tokens))
                    budget -= num_tokens
        return chunks

    def complete(self, chunk: ScheduledChunk) -> None:
        """Publish and offer the full blocks of a computed chunk."""
        sequence = chunk.sequence
        start = sequence.num_computed
        sequence.num_computed += chunk.num_tokens
        sequence.sources.count(None, start, sequence.num_computed)
        num_full = sequence.num_computed // self._pool.shape.block_tokens
        for index in range(sequence.num_published, num_full):
            chain = sequence.chain
            self._pool.publish(sequence.blocks[index], chain.hashes[index], chain.parent(index))
        sequence.num_published = max(sequence.num_published, num_full)
        self.loader.join(sequence)
        self.offload.offer(sequence)
        if not sequence.num_missing:
            self._retract(sequence)

    def load_before(self, sequence: Sequence | None = None) -> EngineLoad:
        """Return the work ahead of a request, or of one that arrives now."""
        ticket = sequence.ticket if sequence is not None else None
        num_tokens = num_running = 0
        for other in self.sequences.values():
            if ticket is not None and other.ticket >= ticket:
                continue
            if other.num_generated and other.phase is Phase.RUNNING:
                num_running += 1
            else:
                num_cached = 0 if other.blocks else other.matched * self._pool.shape.block_tokens
                num_tokens += max(0, other.num_uncovered - num_cached)
        return EngineLoad(num_tokens, num_running)

    # Admission

    @property
    def _num_active(self) -> int:
        return len(self.sequences) - len(self._waiting)

    def _in_order(self, now_ns: int) -> list[Sequence]:
        oldest = sorted(self._waiting, key=lambda sequence: sequence.ticket)[:_ORDERED_MAX]

        def rank(sequence: Sequence) -> tuple[bool, int, int]:
            is_aged = now_ns - sequence.arrival_ns >= self._settings.age_cap_ns
            length = 0 if is_aged else self._estimate_match(sequence)
            return not is_aged, -length, sequence.ticket

        return sorted(oldest, key=rank)

    def _estimate_match(self, sequence: Sequence) -> int:
        """Return about how many leading blocks are cached; reuses the last estimate if valid."""
        if sequence.match_generation != self._pool.generation:
            known = sequence.matched
            hashes = sequence.chain.hashes
            if known and not self._pool.match(hashes[known - 1 : known], 1):
                known = 0
            limit = self._hit_limit(sequence) - known
            sequence.matched = known + self._pool.match(hashes[known:], limit)
            sequence.match_generation = self._pool.generation
        return sequence.matched

    def _hit_limit(self, sequence: Sequence) -> int:
        """Return the most blocks to take from the cache: the last token is always computed."""
        return (len(sequence.tokens) - 1) // self._pool.shape.block_tokens

    def _match(self, sequence: Sequence) -> int:
        return self._pool.match(sequence.chain.hashes, self._hit_limit(sequence))

    def _is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether another request will supply the next block that this one lacks."""
        num_hit = self._match(sequence)
        if num_hit >= self._hit_limit(sequence):
            return False
        owner = self._announced.get(sequence.chain.hashes[num_hit])
        return owner is not None and owner is not sequence

    def _start(self, sequence: Sequence, now_ns: int) -> bool:
        """Look up, load or run a waiting request; returns False if the pool has no room now."""
        num_hit = self._match(sequence)
        hit = self._pool.acquire(sequence.chain.hashes[:num_hit])
        num_new = sequence.num_blocks_needed - num_hit
        if not self._has_room(num_new):
            self._pool.release(hit)
            return False
        if self.loader.wants_lookup(sequence, num_hit):
            self._pool.release(hit)
            sequence.num_reserved = num_new
            self._unqueue(sequence, now_ns)
            self._announce(sequence, num_hit)
            self.loader.look_up(sequence, num_hit, self.load_before(sequence))
            return True
        num_load = self.loader.num_loadable(sequence, num_hit)
        num_spare = self.loader.num_spare(num_hit) if num_load else 0
        if num_load and not self._has_room(num_new + num_spare):
            if self._num_active:
                self._pool.release(hit)
                return False
            num_load = num_spare = 0
            self.loader.decide_computed(sequence, DecisionReason.POOL_FULL)
        self._unqueue(sequence, now_ns)
        self._assign_blocks(sequence, hit, num_new)
        if num_load:
            sequence.timing.begin_restoring(now_ns)
            self.loader.load(sequence, num_hit, num_load, self._allocate(num_spare))
        else:
            self.loader.decide_computed(sequence)
            sequence.phase = Phase.RUNNING
        if sequence.phase is Phase.RUNNING:
            self._running.append(sequence)
        return True

    def _queue(self, sequence: Sequence, now_ns: int) -> None:
        sequence.phase = Phase.WAITING
        sequence.timing.begin_waiting(now_ns)
        self._waiting.append(sequence)

    def _unqueue(self, sequence: Sequence, now_ns: int) -> None:
        self._waiting.remove(sequence)
        sequence.timing.end_waiting(now_ns)

    def _has_room(self, num_blocks: int) -> bool:
        """Return whether blocks are available, besides those already promised.

        Each running sequence may need one more, and each with a lookup in flight all of its own.
        """
        headroom = len(self._running) + self.loader.num_reserved
        return num_blocks + headroom <= self._pool.num_available

    def _allocate(self, num_blocks: int) -> list[int]:
        blocks = self._pool.allocate(num_blocks)
        assert blocks is not None, "the pool must have room"
        return blocks

    def _assign_blocks(self, sequence: Sequence, hit: list[int], num_new: int) -> None:
        """Give a sequence its blocks: the cached ones, and new ones for all its other tokens."""
        sequence.blocks = hit + self._allocate(num_new)
        sequence.num_published = len(hit)
        sequence.num_computed = len(hit) * self._pool.shape.block_tokens
        sequence.sources.count(TierName.GPU, 0, sequence.num_computed)
        self._announce(sequence, len(hit))

    # Single flight

    def _announce(self, sequence: Sequence, num_hit: int) -> None:
        for block_hash in sequence.chain.hashes[num_hit:]:
            if self._announced.setdefault(block_hash, sequence) is sequence:
                sequence.announced.append(block_hash)

    def _retract(self, sequence: Sequence) -> None:
        for block_hash in sequence.announced:
            if self._announced.get(block_hash) is sequence:
                del self._announced[block_hash]
        sequence.announced.clear()

    # Preemption

    def _grow(self, sequence: Sequence, now_ns: int) -> bool:
        """Give a sequence a block for its newest token; returns False if it cannot run now."""
        while len(sequence.blocks) < sequence.num_blocks_needed:
            blocks = self._pool.allocate(1)
            if blocks is not None:
                sequence.blocks += blocks
                continue
            latest = max(self._running, key=lambda running: running.ticket)
            if latest is sequence and len(self._running) == 1:
                return False  # stores or loads hold the rest of the pool, and will end
            self._preempt(latest, now_ns)
            if latest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, now_ns: int) -> None:
        self.num_preemptions += 1
        self.loader.cancel(sequence)
        self._running.remove(sequence)
        self._let_go(sequence)
        sequence.timing.was_preempted = True
        self._queue(sequence, now_ns)

    def _let_go(self, sequence: Sequence) -> None:
        self._retract(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0
        sequence.loaded_tail = sequence.found = None

    # Checks

    def check(self) -> None:
        """Check the pool, and what belongs to each phase; raises AssertionError."""
        self._pool.check()
        self.loader.check()
        _check_queue(self._waiting, Phase.WAITING)
        _check_queue(self._running, Phase.RUNNING)
        for sequence in self.sequences.values():
            has_blocks = sequence.phase in {Phase.LOADING, Phase.RUNNING}
            assert has_blocks or not sequence.blocks, (
                "only loading or running sequences have blocks"
            )
            if has_blocks:
                capacity = len(sequence.blocks) * self._pool.shape.block_tokens
                assert sequence.num_computed <= capacity, "computed tokens must be in blocks"
            if sequence.phase is Phase.RUNNING:
                counts = sequence.sources.is_counted(sequence.num_computed)
                assert counts, "a computed token has no source"
            _check_loaded_tail(sequence)
        for owner in self._announced.values():
            assert owner.request_id in self.sequences, "a removed request still announces blocks"
        if self.is_idle:
            assert self._pool.counts().used == 0, "an idle engine must not hold blocks"


def _check_queue(queue: Iterable[Sequence], phase: Phase) -> None:
    for sequence in queue:
        assert sequence.phase is phase, f"{sequence.request_id} is {sequence.phase}, not {phase}"


def _check_loaded_tail(sequence: Sequence) -> None:
    loaded_tail = sequence.loaded_tail
    if loaded_tail is None:
        return
    assert sequence.phase is Phase.RUNNING, "only running sequences have a loaded tail"
    assert loaded_tail.start <= loaded_tail.end < len(sequence.tokens), (
        "the last token must be computed"
    )
    assert sequence.num_computed < loaded_tail.start, "the sequence has reached its loaded tail"
    size = sequence.chain.block_tokens
    assert loaded_tail.start % size == loaded_tail.end % size == 0, (
        "a loaded tail must be whole blocks"
    )
    assert sequence.num_published * size < loaded_tail.end, (
        "blocks of the tail are published too early"
    )
