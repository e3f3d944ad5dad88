"""Parts of the two halves alone: steps, accounts, searches of ranks, and reports of faults."""

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client import HeldBlocks
from kvtier.connectors.kit.chains import RankChains
from kvtier.connectors.vllm.engine_state import StepChunk, StepClock
from kvtier.connectors.vllm.jobs import (
    LoadJob,
    LoadResult,
    StepJobs,
    StepResults,
    StoreJob,
    WorkerReports,
)
from kvtier.connectors.vllm.request import PrefixLookup, RequestTimes
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.stats import LOOKUPS
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.connectors.vllm_common.settings import traits_of
from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks
from kvtier.core.plan import EngineLoad
from kvtier.core.request import NO_TRAITS
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import await_true
from tests.vllm.recording_client import RecordedDaemon, RecordingClient
from tests.vllm.test_vllm_accounting import Pool

SPACES = [bytes([rank]) * 16 for rank in range(2)]


# Chains


def test_chains_grow_as_if_they_had_been_hashed_at_once() -> None:
    tokens, extra = list(range(50)), {0: b"adapter", 2: b"picture"}
    chains = RankChains(SPACES, NO_TENANT, 8, extra)
    for end in (3, 8, 20, 21, 50):
        chains.extend(tokens[:end])
        assert len(chains) == end // 8
    for space, chain in zip(SPACES, chains.first(6), strict=True):
        assert list(chain) == hash_blocks(chain_root(space, NO_TENANT), tokens, 8, extra)
    assert chains.first(2) == tuple(chain[:2] for chain in chains.first(6))


# Steps


def test_a_step_is_told_by_its_number() -> None:
    clock = StepClock()
    empty = clock.begin((), 1.0)
    first = clock.begin([StepChunk("a", 100, 0, 100), StepChunk("b", 1, 50, 40)], 2.0)
    second = clock.begin([StepChunk("b", 1, 51, 40)], 2.5)
    assert clock.end(99, 3.0) is None
    step = clock.end(first, 4.0)
    assert step is not None
    sample = step.sample()
    assert (sample.num_prefill_tokens, sample.num_decode_tokens) == (100, 1)
    assert (sample.attended, sample.decode_past_tokens, sample.seconds) == (5000.0, 50, 2.0)
    assert step.share_s(step.chunks[0]) == pytest.approx(2.0 * 100 / 101)
    assert clock.end(first, 5.0) is None, "told once"
    last = clock.end(second, 5.0)
    assert last is not None
    assert last.seconds == 1.0, "it began when the one before ended"
    assert clock.end(empty, 6.0) is None


def test_steps_that_nobody_ends_are_forgotten() -> None:
    clock = StepClock()
    numbers = [clock.begin([StepChunk("a", 1, 0, 9)], float(place)) for place in range(200)]
    assert clock.end(numbers[0], 300.0) is None
    assert clock.end(numbers[-1], 300.0) is not None


# Accounts


def test_an_account_of_a_restored_request() -> None:
    times = RequestTimes(10.0, num_restored=3, restore_s=0.5)
    times.note_chunk(80, 12.0)
    times.note_chunk(20, 12.3)
    times.compute_s = 0.4
    outcome = times.outcome(7, [TierName.SSD, TierName.SSD, TierName.CPU, TierName.CPU], 13.0)
    assert outcome is not None
    assert outcome.tiers == ((TierName.SSD, 2), (TierName.CPU, 1))
    assert (outcome.decision, outcome.computed_tokens) == (7, 100)
    assert (outcome.ttft_s, outcome.restore_s, outcome.compute_s) == (3.0, 0.5, 0.4)
    assert outcome.wait_s == pytest.approx(1.5), "what was neither restoring nor computing"


def test_there_is_no_outcome_without_a_plan_or_a_chunk() -> None:
    times = RequestTimes(10.0)
    assert times.outcome(7, (), 11.0) is None
    times.note_chunk(1, 10.5)
    assert times.outcome(0, (), 11.0) is None


# Searches


def search(*daemons: RecordedDaemon) -> PrefixLookup:
    chains = RankChains(SPACES[: len(daemons)], NO_TENANT, 8)
    chains.extend(list(range(40)))
    for daemon, chain in zip(daemons, chains.first(5), strict=True):
        daemon.stored |= {(NO_TENANT, each): () for each in chain}
    clients: Any = [RecordingClient(daemon) for daemon in daemons]
    return PrefixLookup(clients, NO_TENANT, chains.first(5), 1, NO_TRAITS, EngineLoad())


def test_a_search_finds_what_all_ranks_hold() -> None:
    one, other = RecordedDaemon(), RecordedDaemon(hold_most=2, advised_tokens=24)
    asked = search(one, other)
    asked.run()
    assert (asked.num_blocks, asked.is_over, asked.has_failed) == (2, True, False)
    assert [len(asked.tiers_of(rank)) for rank in range(2)] == [2, 2]
    assert asked.max_offload_tokens == 24
    assert (len(one.open_leases), len(other.open_leases)) == (1, 1)
    asked.release()
    assert not one.open_leases
    assert not other.open_leases


@pytest.mark.parametrize("hold_most", [0, 5])
def test_a_search_that_one_rank_fails_holds_nothing(hold_most: int) -> None:
    class Failing(RecordingClient):
        def hold(self, *_: Any, **__: Any) -> HeldBlocks:
            raise DaemonUnavailable("gone")

    one, other = RecordedDaemon(hold_most=hold_most), RecordedDaemon()
    asked = search(one, other)
    asked.clients = [asked.clients[0], Failing(other)]
    asked.run()
    assert (asked.num_blocks, asked.is_over, asked.has_failed) == (0, True, True)
    assert not one.open_leases


def test_a_search_that_nobody_wants_any_more_lets_go() -> None:
    daemon = RecordedDaemon()
    asked = search(daemon)
    asked.release()
    asked.run()
    assert asked.is_over
    assert not daemon.num_leases
    entered, left = threading.Event(), threading.Event()

    class Slow(RecordingClient):
        def hold(self, *rest: Any, **more: Any) -> HeldBlocks:
            entered.set()
            assert left.wait(10)
            return super().hold(*rest, **more)

    asked = search(daemon)
    asked.clients = [Slow(daemon)]
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(asked.run)
        assert entered.wait(10)
        asked.release()
        left.set()
        done.result(10)
    assert daemon.num_leases == 1
    assert not daemon.open_leases


# RequestTraits


def test_a_name_that_no_message_can_carry_does_not_cost_the_cache() -> None:
    asked = SimpleNamespace(request_id="x" * 1000, num_tokens=5, kv_transfer_params=None)
    assert traits_of(asked).request_id == ""
    asked.request_id = "cmpl-a b\n-0"
    assert traits_of(asked).request_id == ""
    asked.request_id, asked.kv_transfer_params = "cmpl-1", {"max_load_tokens": 1 << 40}
    assert traits_of(asked).request_id == "cmpl-1"
    assert traits_of(asked).max_load_tokens == (1 << 32) - 1


# Results and reports


def test_results_of_workers_add_up() -> None:
    results = StepResults(3)
    results.note_loaded("a", LoadResult(5, 1.0))
    other = StepResults(3)
    other.note_loaded("a", LoadResult(2, 2.0))
    other.stored[9] = 1
    results.stored[9] = 1
    results.add(other)
    assert results.loaded == {"a": LoadResult(2, 2.0, num_workers=2)}
    assert results.stored == {9: 2}
    assert not StepResults()


LOAD = LoadJob("a", NO_TENANT, ((b"h" * 16,),), 0, ((-1, 7, 8, 9),), (1,), 1e12)
STORE = StoreJob(4, NO_TENANT, ((b"h" * 16,),), 0, ((1, 2, 3, 4),))


class BrokenCopies:
    """A device that has failed, at one point or another."""

    num_readers = 1
    arena = None

    def __init__(self, *, has_fence: bool) -> None:
        self._has_fence = has_fence

    def fence(self) -> Any:
        if not self._has_fence:
            raise RuntimeError("the device is gone")
        return SimpleNamespace(is_over=lambda: True, wait=lambda: None)

    def close(self) -> None:
        pass


class BrokenClient(RecordingClient):
    def load(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    store = load


@pytest.mark.parametrize("has_fence", [True, False])
def test_whatever_fails_in_a_worker_each_order_is_reported_once(has_fence: bool) -> None:
    copies: Any = BrokenCopies(has_fence=has_fence)
    client: Any = BrokenClient(RecordedDaemon())
    worker = WorkerHalf(client, copies)
    jobs = StepJobs(loads=[LOAD], stores=[STORE])
    for begin in (worker.load, worker.store):
        if has_fence:
            begin(jobs)
        else:
            with pytest.raises(RuntimeError, match="the device is gone"):
                begin(jobs)
    reports = worker.reports
    await_true(lambda: reports._received and reports._results.stored, "both are reported")
    worker.close()
    with nullcontext() if has_fence else pytest.raises(RuntimeError, match="the device is gone"):
        worker.load(StepJobs(loads=[LoadJob("b", NO_TENANT, (), 0, ((5,),))]))
    assert reports.take_received() == {"a", "b"}
    assert reports.take_missing() == {5, 7, 8, 9}
    results = reports.take_results(0)
    assert results is not None
    assert {name: loaded.num_filled for name, loaded in results.loaded.items()} == {"a": 0, "b": 0}
    assert results.stored == {4: 1}
    assert reports.take_results(0) is None


def test_what_no_worker_is_there_for_is_reported() -> None:
    reports = WorkerReports()
    reports.refuse([LOAD, STORE])
    assert reports.take_received() == {"a"}
    assert reports.take_missing() == {7, 8, 9}
    assert reports.take_results(6) == StepResults(6, {4: 1}, {"a": reports_loaded(0)})


class reports_loaded:  # noqa: N801 - reads as a value
    """Equals how a load went, whenever that was."""

    def __init__(self, num_filled: int) -> None:
        self._num_filled = num_filled

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadResult) and other.num_filled == self._num_filled

    __hash__ = None


# The scheduler half


def half(daemon: RecordedDaemon) -> SchedulerHalf:
    client: Any = RecordingClient(daemon)
    made = SchedulerHalf([Rank(client, SPACES[0])], 8, 2)
    made.bind(Pool())
    return made


def asked(name: str, num_tokens: int = 40, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(range(num_tokens)),
        "num_tokens": num_tokens,
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "num_preemptions": 0,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
        "trace_headers": None,
        "block_hashes": [],
    }
    return SimpleNamespace(**fields | more)


def test_a_load_that_was_not_named_is_ordered_all_the_same_and_brings_nothing() -> None:
    made = half(RecordedDaemon())
    made.add(asked("a"))
    with pytest.raises(AssertionError):
        made.start_load(asked("a"), [3, 4, 5], 8)
    (order,) = made.take_jobs().loads
    assert (order.request_id, order.into, order.good_until_s) == ("a", ((3, 4, 5),), 0.0)
    made.close()


def test_no_more_searches_are_open_than_may_be_and_all_have_their_turn() -> None:
    daemon = RecordedDaemon()
    made = half(daemon)
    made._lookups._askers.shutdown()
    waiting: list[Any] = []

    def submit(work: Any, *rest: Any) -> Future[None]:
        waiting.append((work, rest))
        return Future()

    made._lookups._askers = SimpleNamespace(submit=submit, shutdown=lambda **_: None)
    requests = [asked(f"request-{number}") for number in range(100)]
    for request in requests:
        made.add(request)
        assert made.match(request, 0) is None
    assert len(waiting) == 64
    tracked = made._tracked["request-99"]
    assert tracked.waits_since_s is not None
    tracked.waits_since_s -= 2
    assert made.match(requests[99], 0) == 0, "it has waited long enough"
    for request in requests[:64]:
        made.finish(request)
    assert made.match(requests[99], 0) is None, "and now there is room"
    assert len(waiting) == 65
    made.close()


def test_an_idle_engine_goes_on_until_stores_are_over_and_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("kvtier.connectors.vllm.scheduler.time", clock)
    made = half(RecordedDaemon())
    longest_s = 4 * made._deadlines.store_s
    request = asked("a")
    made.add(request)
    made.start_load(request, list(range(20)), 0)
    fresh = SimpleNamespace(req_id="a", block_ids=(list(range(10)),), num_computed_tokens=0)
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[fresh],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 40},
    )
    made.start_stores(output)
    jobs = made.take_jobs()
    (order,) = jobs.stores
    assert made.has_pending_stores
    assert made.frees_blocks_soon, "the store has the last reference"
    made._stores._pool.touch(made._stores._pool.blocks[:10])
    assert not made.frees_blocks_soon, "the request has its blocks still"
    now_s[0] += 2 * longest_s  # a long prompt on a slow machine
    made.take_results(StepResults(step=jobs.step))
    made.finish(request)
    assert made.has_pending_stores, "it began when its step had ended"
    now_s[0] += 1.01 * longest_s
    made.take_results(StepResults())
    assert not made.has_pending_stores, "no store is waited for without end"
    now_s[0] -= 0.02 * longest_s
    assert made.has_pending_stores
    made.take_results(StepResults(stored={order.number: 1}))
    assert not made.has_pending_stores
    made.close()


def test_a_daemon_that_has_nothing_is_not_asked_until_something_is_stored() -> None:
    daemon = RecordedDaemon(empty_s=60.0)
    made = half(daemon)

    def match(name: str) -> int | None:
        made.add(asked(name))
        return made.match(asked(name), 0)

    assert match("a") is None, "it is asked"
    await_true(lambda: made.match(asked("a"), 0) == 0, "there is nothing")
    assert match("b") == 0
    assert made.match(asked("b"), 0) == 0, "it waits for room, and is asked about again"
    assert daemon.num_decisions == 1
    assert made.counters.take()[LOOKUPS.name]["empty"] == [1]
    number = made._stores.open([1, 2], 0.0)
    assert match("c") is None, "its own store may be done by now"
    await_true(lambda: made.match(asked("c"), 0) == 0, "there is nothing yet")
    made.take_results(StepResults(stored={number: 1}))
    assert match("d") is None
    made.close()


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_vllm_has_lost_since_the_search_is_not_skipped(is_stored: bool) -> None:
    """It would compute with blocks that nobody has filled."""
    daemon = RecordedDaemon()
    made = half(daemon)
    request = asked("a")
    made.add(request)
    if is_stored:
        (chain,) = made._tracked["a"].chains.first(5)
        daemon.stored |= {(NO_TENANT, each): () for each in chain}

    def answer(num_local: int) -> int:
        found = await_true(
            lambda: (held,) if (held := made.match(request, num_local)) is not None else None,
            "the search is over",
        )
        return int(found[0])

    assert answer(20) == (12 if is_stored else 0), "from the third block on"
    assert answer(4) == (28 if is_stored else 0), "from the first block on"
    made.start_load(request, list(range(10, 20)), 28 if is_stored else 0)
    loads = made.take_jobs().loads
    if is_stored:
        (order,) = loads
        assert (order.first, order.into[0], order.into[3]) == (0, (-1, 11), (16, 17))
    made.finish(request)
    assert not daemon.open_leases
    made.close()


def test_blocks_that_are_lost_again_and_again_are_computed() -> None:
    daemon = RecordedDaemon(lease_s=0.0)
    made, request = half(daemon), asked("a")
    made.add(request)
    (chain,) = made._tracked["a"].chains.first(5)
    daemon.stored = {(NO_TENANT, block_hash): None for block_hash in chain}
    await_true(lambda: made.match(request, 0) == 0, "vLLM is told that there is nothing")
    assert not made._lookups
    assert not daemon.open_leases
    made.close()


def test_a_chunk_beyond_the_share_of_the_pool_is_offered_in_parts() -> None:
    made = half(RecordedDaemon())
    pool = Pool()
    made.bind(pool)
    share = len(pool.blocks) // 4
    num_blocks = share + 4
    request = asked("a", num_tokens=4 * num_blocks)
    made.add(request)

    def step(num_past: int, num_new: int) -> list[StoreJob]:
        fresh = SimpleNamespace(
            req_id="a", block_ids=(list(range(num_blocks)),), num_computed_tokens=num_past
        )
        none = SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )
        made.start_stores(
            SimpleNamespace(
                scheduled_new_reqs=[fresh],
                scheduled_cached_reqs=none,
                num_scheduled_tokens={"a": num_new},
            )
        )
        return list(made.take_jobs().stores)

    (first,) = step(0, 4 * num_blocks)
    assert 0 < 2 * len(first.blocks) <= share
    assert not step(4 * num_blocks, 0), "there is no room before it is done"
    made.take_results(StepResults(stored=Counter({first.number: 1})))
    (second,) = step(4 * num_blocks, 0)
    assert second.first == len(first.blocks)
    assert second.first + len(second.blocks) == num_blocks // 2
    made.close()


def test_what_reached_no_worker_is_said_of_fresh_blocks_alone() -> None:
    made = half(RecordedDaemon())
    made.add(asked("a"))
    made._tracked["a"].num_local = 8
    with pytest.raises(AssertionError):
        made.start_load(asked("a"), [3, 4, 5], 4)
    (order,) = made.take_jobs().loads
    assert order.into == ((5,),), "those before it vLLM has, and others too"
    made.close()
