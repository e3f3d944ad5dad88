"""The scheduler half under any order of events: what vLLM computes with is right, and at the end
nothing is held, neither of vLLM's blocks nor of the daemon's."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.vllm.jobs import LoadJob, LoadResult, StepResults, StoreJob
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.core.identity import NO_TENANT
from tests.vllm.recording_client import LEASE_S, RecordedDaemon, RecordingClient

NUM_RANKS = 2
RATIO = 4
ENGINE_TOKENS = 4
BLOCK_TOKENS = RATIO * ENGINE_TOKENS
NUM_BLOCKS = 120
KEY_SPACES = [bytes([rank]) * 16 for rank in range(NUM_RANKS)]

LENGTH_MAX = 90

Content = tuple[int, ...] | None
"""What is in a block of vLLM: all tokens up to its end, or nothing that is known."""


@dataclass
class PoolBlock:
    block_id: int
    ref_cnt: int = 0


class Pool:
    """Hands out blocks, and counts who has them."""

    def __init__(self) -> None:
        self.blocks = [PoolBlock(number) for number in range(NUM_BLOCKS)]
        self.content: list[Content] = [None] * NUM_BLOCKS

    def take(self, count: int) -> list[int]:
        free = [block.block_id for block in self.blocks if not block.ref_cnt][:count]
        if len(free) < count:
            return []
        for number in free:
            self.content[number] = None
        self.touch([self.blocks[number] for number in free])
        return free

    def touch(self, blocks: Sequence[PoolBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[PoolBlock]) -> None:
        for block in blocks:
            assert block.ref_cnt, "freed once too often"
            block.ref_cnt -= 1


class Queue:
    """An executor whose work is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], object]] = []

    def submit(self, work: Callable[..., object], *arguments: object) -> Future[None]:
        self.waiting.append(lambda: work(*arguments))
        return Future()

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        assert cancel_futures
        assert not wait, "vLLM's end is not held up"
        self.waiting.clear()


@dataclass
class Run:
    """A request as vLLM has it."""

    request: Any
    state: str = "waiting"
    blocks: list[int] = field(default_factory=list)
    num_local: int = 0
    is_new: bool = True
    promised_end: int = 0


@dataclass
class Copy:
    """An order on its way through the workers."""

    order: Any
    left: list[int]
    num_filled: int = 0


def prompt(kind: int, length: int) -> list[int]:
    return [kind * 1000 + place for place in range(length)]


class Accounting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.daemon = RecordedDaemon()
        clients = [RecordingClient(self.daemon) for _ in KEY_SPACES]
        ranks = [Rank(each, space) for each, space in zip(clients, KEY_SPACES, strict=True)]
        self.half = SchedulerHalf(ranks, BLOCK_TOKENS, RATIO)
        self.half._lookups._askers.shutdown()
        self.queue = Queue()
        self.half._lookups._askers = self.queue
        self.pool = Pool()
        self.half.bind(self.pool)
        self.runs: dict[str, Run] = {}
        self.loads: dict[str, Copy] = {}
        self.stores: list[Copy] = []
        self.aborted: dict[str, Run] = {}
        """While their load is under way, vLLM keeps their blocks."""
        self.steps: list[int] = []
        self.num_added = 0
        self._fill_daemon()

    def _fill_daemon(self) -> None:
        """Have another engine's blocks there, of two prompts of three."""
        for kind in range(2):
            tokens = prompt(kind, LENGTH_MAX)
            chains = RankChains(KEY_SPACES, NO_TENANT, BLOCK_TOKENS)
            chains.extend(tokens)
            for chain in chains.first(len(chains)):
                for index, block_hash in enumerate(chain):
                    end = (index + 1) * BLOCK_TOKENS
                    self.daemon.stored[NO_TENANT, block_hash] = tuple(tokens[:end])

    # Requests

    @rule(
        kind=st.integers(0, 2),
        length=st.integers(1, LENGTH_MAX) | st.just(LENGTH_MAX),
        most=st.sampled_from([None, None, 0, 40]),
    )
    def add(self, kind: int, length: int, most: int | None) -> None:
        self.num_added += 1
        name = f"request-{self.num_added % 5}"
        if name in self.runs or name in self.loads:
            return
        tokens = prompt(kind, length)
        request = SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            num_tokens=length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            num_output_tokens=0,
            num_preemptions=0,
            lora_request=None,
            mm_features=[],
            prompt_embeds=None,
            cache_salt=None,
            kv_transfer_params={"max_load_tokens": most, "max_offload_tokens": most},
            skip_reading_prefix_cache=False,
            trace_headers=None,
            block_hashes=[],
        )
        self.runs[name] = Run(request)
        self.half.add(request)

    @precondition(lambda self: self._in("waiting"))
    @rule(
        pick=st.integers(0, 4),
        local=st.integers(0, 22),
        has_answer=st.sampled_from([True, True, False]),
        has_room=st.sampled_from([True, True, False]),
    )
    def schedule(self, pick: int, local: int, has_answer: bool, has_room: bool) -> None:
        """Ask after a waiting request, and give it blocks if there are some."""
        run = self._pick("waiting", pick)
        num_local = self._local(run, local)
        self.half.match(run.request, num_local)
        if has_answer:
            self._search_all()
        if has_room:
            self._admit(run, num_local)

    def _local(self, run: Run, local: int) -> int:
        return min(local, (int(run.request.num_tokens) - 1) // ENGINE_TOKENS) * ENGINE_TOKENS

    def _admit(self, run: Run, num_local: int) -> None:
        request = run.request
        answer = self.half.match(request, num_local)
        if answer is None:
            return
        assert 0 <= answer < request.num_tokens - num_local
        most = request.kv_transfer_params["max_load_tokens"]
        assert most is None or answer <= most
        assert (num_local + answer) % BLOCK_TOKENS == 0 or not answer
        blocks = self.pool.take(-(-request.num_tokens // ENGINE_TOKENS))
        if not blocks:
            return
        run.blocks, run.num_local = blocks, num_local
        for place in range(num_local // ENGINE_TOKENS):
            self._write(run, place)
        self.half.start_load(request, blocks, answer)
        request.num_computed_tokens = run.promised_end = num_local + answer
        run.state = "loading" if answer else "running"
        self._step([], {run.request.request_id} if answer else set())

    @precondition(lambda self: self._in("running"))
    @rule(pick=st.integers(0, 4), count=st.integers(1, 64), is_last=st.booleans())
    def compute(self, pick: int, count: int, is_last: bool) -> None:
        """Compute a chunk of a running request, or of its answer."""
        run = self._pick("running", pick)
        request = run.request
        num_new = min(count, request.num_tokens - request.num_computed_tokens)
        needed = -(-(request.num_computed_tokens + num_new) // ENGINE_TOKENS)
        more = self.pool.take(max(0, needed - len(run.blocks)))
        if needed > len(run.blocks) + len(more):
            return
        run.blocks += more
        self._check(run)
        self._step([(run, num_new, more)], set())
        start = request.num_computed_tokens
        request.num_computed_tokens += num_new
        for place in range(start // ENGINE_TOKENS, request.num_computed_tokens // ENGINE_TOKENS):
            self._write(run, place)
        if request.num_computed_tokens == request.num_tokens:
            request.all_token_ids.append(5000 + len(request.all_token_ids))
            request.num_tokens += 1
            request.num_output_tokens += 1
            if is_last:
                self._end(run)
        self._deliver(StepResults())

    @precondition(lambda self: self._in("running"))
    @rule(pick=st.integers(0, 4))
    def preempt(self, pick: int) -> None:
        run = self._pick("running", pick)
        self._free(run)
        run.state = "waiting"
        run.request.num_computed_tokens = 0
        run.request.num_preemptions += 1

    @precondition(lambda self: self.runs)
    @rule(pick=st.integers(0, 4))
    def abort(self, pick: int) -> None:
        runs = list(self.runs.values())
        self._end(runs[pick % len(runs)])

    # Threads, workers, the daemon

    @precondition(lambda self: self.queue.waiting)
    @rule()
    def search(self) -> None:
        self.queue.waiting.pop(0)()

    def _search_all(self) -> None:
        while self.queue.waiting:
            self.search()

    @precondition(lambda self: self.loads)
    @rule(pick=st.integers(0, 4), filled=st.integers(0, 6))
    def load(self, pick: int, filled: int) -> None:
        """Have one worker be done with a load."""
        name = list(self.loads)[pick % len(self.loads)]
        copy = self.loads[name]
        order: LoadJob = copy.order
        copy.left.pop()
        done = min(filled, len(order.into))
        copy.num_filled = min(copy.num_filled, done)
        results = StepResults()
        results.note_loaded(name, LoadResult(done, 0.0))
        if not copy.left:
            del self.loads[name]
        self._deliver(results)
        if name not in self.loads:
            self._received(name, order, copy.num_filled)

    @precondition(lambda self: self.stores)
    @rule(pick=st.integers(0, 4), is_kept=st.booleans())
    def store(self, pick: int, is_kept: bool) -> None:
        """Have one worker be done with a store."""
        copy = self.stores[pick % len(self.stores)]
        order: StoreJob = copy.order
        rank = copy.left.pop()
        for place, blocks in enumerate(order.blocks):
            index = order.first + place
            found = [self.pool.content[block] for block in blocks]
            ends = [(index * RATIO + part + 1) * ENGINE_TOKENS for part in range(RATIO)]
            tokens = found[-1]
            assert tokens is not None, "the block was given to somebody else below the copy"
            assert found == [tokens[:end] for end in ends]
            key = (NO_TENANT, order.chains[rank][index])
            assert self.daemon.stored.setdefault(key, tokens) == tokens if is_kept else True
        results = StepResults()
        results.stored[order.number] = 1
        if not copy.left:
            self.stores.remove(copy)
        self._deliver(results)

    @rule(
        is_away=st.sampled_from([False, False, False, True]),
        is_short=st.sampled_from([False, False, False, True]),
        most=st.sampled_from([6, 6, 2, 0]),
        advised=st.sampled_from([None, None, 0, 40]),
    )
    def change(self, is_away: bool, is_short: bool, most: int, advised: int | None) -> None:
        """Have the daemon come or go, give short leases, bring up little, or advise a depth."""
        self.daemon.is_away = is_away
        self.daemon.lease_s = 0.0 if is_short else LEASE_S
        self.daemon.hold_most = most
        self.daemon.advised_tokens = advised

    # What must be

    @invariant()
    def references_add_up(self) -> None:
        wanted = [0] * NUM_BLOCKS
        for run in [*self.runs.values(), *self.aborted.values()]:
            for block in run.blocks:
                wanted[block] += 1
        for copy in self.stores:
            for blocks in copy.order.blocks:
                for block in blocks:
                    wanted[block] += 1
        assert [block.ref_cnt for block in self.pool.blocks] == wanted
        assert len(self.half._stores) == len(self.stores)

    @invariant()
    def what_is_promised_is_held(self) -> None:
        for name in self.loads:
            if name in self.runs:
                assert self.daemon.open_leases, name

    def teardown(self) -> None:
        for run in list(self.runs.values()):
            self._end(run)
        self._search_all()
        while self.loads:
            self.load(0, 6)
        while self.stores:
            self.store(0, True)
        self.references_add_up()
        assert not self.daemon.open_leases
        assert not self.half._tracked
        assert not self.half._lookups
        assert not len(self.half._loads)
        assert not any(block.ref_cnt for block in self.pool.blocks)
        decisions = [outcome.decision for outcome in self.daemon.outcomes]
        assert len(decisions) == len(set(decisions)), "each plan has one outcome"
        self.half.close()

    # vLLM's part

    def _in(self, state: str) -> list[Run]:
        return [run for run in self.runs.values() if run.state == state]

    def _pick(self, state: str, pick: int) -> Run:
        runs = self._in(state)
        return runs[pick % len(runs)]

    def _write(self, run: Run, place: int) -> None:
        end = (place + 1) * ENGINE_TOKENS
        self.pool.content[run.blocks[place]] = tuple(run.request.all_token_ids[:end])

    def _check(self, run: Run) -> None:
        """Fail where vLLM would compute with KV that is not its prompt's."""
        tokens = run.request.all_token_ids
        for place in range(run.request.num_computed_tokens // ENGINE_TOKENS):
            end = (place + 1) * ENGINE_TOKENS
            assert self.pool.content[run.blocks[place]] == tuple(tokens[:end]), place

    def _step(self, chunks: list[tuple[Run, int, list[int]]], loading: set[str]) -> None:
        fresh, ids, blocks, computed, resumed = [], [], [], [], set()
        for run, _, more in chunks:
            request = run.request
            if run.is_new:
                fresh.append(
                    SimpleNamespace(
                        req_id=request.request_id,
                        block_ids=(list(run.blocks),),
                        num_computed_tokens=request.num_computed_tokens,
                    )
                )
            else:
                is_resumed = run.state == "running" and run.is_new is None
                ids.append(request.request_id)
                blocks.append((list(run.blocks) if is_resumed else more,))
                computed.append(request.num_computed_tokens)
                resumed |= {request.request_id} if is_resumed else set()
            run.is_new = False
        self.half.start_stores(
            SimpleNamespace(
                scheduled_new_reqs=fresh,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=ids,
                    new_block_ids=blocks,
                    num_computed_tokens=computed,
                    resumed_req_ids=resumed,
                ),
                num_scheduled_tokens={run.request.request_id: num for run, num, _ in chunks},
            )
        )
        jobs = self.half.take_jobs()
        assert {order.request_id for order in jobs.loads} == loading, "one order for each promise"
        for load in jobs.loads:
            self._check_load(load)
            self.loads[load.request_id] = Copy(load, list(range(NUM_RANKS)), len(load.into))
        self.stores += [Copy(store, list(range(NUM_RANKS))) for store in jobs.stores]
        if jobs.step:
            self.steps.append(jobs.step)

    def _check_load(self, order: LoadJob) -> None:
        """Fail where not exactly what was promised is ordered."""
        run = self.runs[order.request_id]
        flat = [block for blocks in order.into for block in blocks]
        start = order.first * RATIO
        wanted = {
            place: run.blocks[place]
            for place in range(run.num_local // ENGINE_TOKENS, run.promised_end // ENGINE_TOKENS)
        }
        ordered = {start + at: block for at, block in enumerate(flat) if block >= 0}
        assert ordered == wanted, (order.first, run.num_local, run.promised_end, ordered, wanted)
        for chain in order.chains:
            assert len(chain) == order.first + len(order.into)
            for block_hash in chain[order.first :]:
                assert (NO_TENANT, block_hash) in self.daemon.stored

    def _received(self, name: str, order: LoadJob, num_filled: int) -> None:
        run = self.runs.get(name) or self.aborted[name]
        for place, blocks in enumerate(order.into[:num_filled]):
            index = order.first + place
            tokens: Any = self.daemon.stored[NO_TENANT, order.chains[0][index]]
            for part, block in enumerate(blocks):
                if block >= 0:
                    end = (index * RATIO + part + 1) * ENGINE_TOKENS
                    self.pool.content[block] = tokens[:end]
        if name in self.aborted:
            self._free(self.aborted.pop(name))
            return
        end = min(run.promised_end, (order.first + num_filled) * BLOCK_TOKENS)
        run.request.num_computed_tokens = max(run.num_local, end)
        run.state = "running"
        self._check(run)

    def _deliver(self, results: StepResults) -> None:
        results.step = self.steps.pop(0) if self.steps else 0
        self.half.take_results(results)

    def _end(self, run: Run) -> None:
        name = run.request.request_id
        del self.runs[name]
        self.half.finish(run.request)
        if run.state == "loading":
            self.aborted[name] = run
        else:
            self._free(run)

    def _free(self, run: Run) -> None:
        self.pool.free_blocks([self.pool.blocks[block] for block in run.blocks])
        run.blocks = []
        run.is_new = None if run.is_new is False else run.is_new


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
