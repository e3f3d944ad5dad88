"""A reset reaches the daemon, and where it cannot, nothing of before is loaded until it has."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvtier.client import ClientDeadlines
from kvtier.connectors.vllm.jobs import StepJobs
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm, request

pytestmark = pytest.mark.slow

TOKENS = list(range(1000, 1300))
OTHERS = list(range(5000, 5300))
"""Four blocks of ours and a tail each."""
BLOCKS = list(range(1, 20))
AGAIN = list(range(21, 40))

DEADLINES = ClientDeadlines(0.25, 2, 2, 0.1)


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def blocks_of(node: RunningNode) -> list[int]:
    tiers = node.stat()["tiers"]
    return [tiers[tier]["blocks"] for tier in ("cpu", "ssd")]


def await_served_again(small: SmallVllm, tokens: list[int]) -> None:
    """Wait until blocks come back that were stored after the reset."""
    await_true(lambda: small.prefill(tokens, AGAIN)[0] == 256, "it loads again")


def ordered_stores(small: SmallVllm) -> StepJobs:
    """Have a request computed, and return what its worker has still to do."""
    asked, scheduler = request("ordered", TOKENS), small.scheduler
    scheduler.add(asked)
    await_true(lambda: scheduler.match(asked, 0) == 0, "nothing is there")
    scheduler.start_load(asked, BLOCKS, 0)
    small.compute(TOKENS, BLOCKS)
    fresh = SimpleNamespace(req_id="ordered", num_computed_tokens=0, block_ids=(BLOCKS,))
    none = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    scheduled = {"ordered": len(TOKENS)}
    scheduler.start_stores(
        SimpleNamespace(
            scheduled_new_reqs=[fresh],
            scheduled_cached_reqs=none,
            num_scheduled_tokens=scheduled,
        )
    )
    jobs = scheduler.take_jobs()
    assert len(jobs.stores) == 1
    return jobs


def test_a_reset_empties_every_tier_at_once(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        small.prefill(TOKENS, BLOCKS, cache_salt="a tenant's")
        node.await_blocks("ssd", 8)
        small.scheduler.reset()
        assert blocks_of(node) == [0, 0]
        assert small.prefill(TOKENS, AGAIN) == (0, set())
        assert small.prefill(TOKENS, AGAIN) == (256, set()), "what comes after it stays"


def test_others_keep_what_they_have(node: RunningNode) -> None:
    with (
        node.daemon(),
        SmallVllm(node.socket) as small,
        SmallVllm(node.socket, weights=b"\x01" * 32) as other,
    ):
        small.prefill(TOKENS, BLOCKS)
        other.prefill(TOKENS, BLOCKS)
        small.scheduler.reset()
        assert other.prefill(TOKENS, AGAIN) == (256, set())


def test_a_daemon_that_hangs_forgets_before_anything_is_found(node: RunningNode) -> None:
    with node.daemon() as daemon, SmallVllm(node.socket, deadlines=DEADLINES) as small:
        small.prefill(TOKENS, BLOCKS)
        with daemon.stopped():
            small.scheduler.reset()
            assert small.prefill(OTHERS, BLOCKS) == (0, set())
        assert small.prefill(TOKENS, AGAIN) == (0, set()), "it is there, and not found"
        await_served_again(small, OTHERS)
        node.await_idle()
        assert blocks_of(node)[0] == 4, "what was there before has gone"


def test_a_disk_that_comes_back_is_emptied_before_anything_is_found(node: RunningNode) -> None:
    daemon = node.daemon()
    with SmallVllm(node.socket, deadlines=DEADLINES) as small:
        small.prefill(TOKENS, BLOCKS)
        node.await_blocks("ssd", 4)
        daemon.kill()
        await_true(lambda: not any(c.is_attached for c in small.clients), "it is gone")
        small.scheduler.reset()
        with node.daemon():
            await_true(lambda: all(c.is_attached for c in small.clients), "it is back")
            assert small.prefill(TOKENS, AGAIN) == (0, set())
            await_served_again(small, OTHERS)
            node.await_idle()
            assert blocks_of(node) == [4, 4]


def test_a_store_that_was_ordered_before_does_not_stay(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, deadlines=DEADLINES) as small:
        jobs = ordered_stores(small)
        small.scheduler.reset()
        small.worker.store(jobs)
        await_served_again(small, OTHERS)
        node.await_idle()
        assert blocks_of(node) == [4, 4]
        assert not small.pool.references


def test_a_request_from_before_a_reset_offers_nothing_any_more(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, deadlines=DEADLINES) as small:

        def reset() -> None:
            small.scheduler.reset()

        assert small.prefill(TOKENS, BLOCKS, before_copy=reset) == (0, set())
        node.await_idle()
        assert blocks_of(node) == [0, 0]
