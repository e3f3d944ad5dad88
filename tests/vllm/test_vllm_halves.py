"""The two halves against a real daemon, through as much of vLLM as they see."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from kvtier.client import ClientDeadlines
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm

pytestmark = pytest.mark.slow

TOKENS = list(range(1000, 1300))
"""Four blocks of ours and a tail; vLLM has 16 tokens in a block."""
BLOCKS = list(range(1, 20))
OTHERS = list(range(21, 40))
NUM_FULL = 16


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def test_blocks_come_back_into_other_blocks(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as first:
        assert first.prefill(TOKENS, BLOCKS) == (0, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4
        before = first.content(BLOCKS[:NUM_FULL])
        with SmallVllm(node.socket) as second:
            assert second.prefill(TOKENS, OTHERS) == (256, set())
            after = second.content(OTHERS[:NUM_FULL])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not first.pool.references, "nothing is held once stores are over"
        node.await_idle()


def test_a_step_that_takes_longer_than_a_store_may_is_stored(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt on a slow machine: the order is older than a store may be when it begins."""
    long_ago = SimpleNamespace(monotonic=lambda: time.monotonic() - 100)
    monkeypatch.setattr("kvtier.connectors.vllm.scheduler.time", long_ago)
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4


def test_what_vllm_has_is_not_written_to(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        for tensor in small.tensors.values():
            tensor.zero_()
        # 32 tokens are vLLM's own: half a block of ours, which comes whole all the same.
        assert small.prefill(TOKENS, OTHERS, num_local=32) == (224, set())
        assert small.scheduler.hit_tokens == 32
        assert not small.content(OTHERS[:2])[0].any()
        assert small.content(OTHERS[2:NUM_FULL])[0].all()
        node.await_idle()


def test_the_last_token_is_always_computed(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS[:256], BLOCKS)
        assert small.prefill(TOKENS[:256], OTHERS) == (192, set())


def test_limits_of_a_request_are_kept(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS, kv_transfer_params={"max_offload_tokens": 130})
        assert node.stat()["tiers"]["cpu"]["blocks"] == 2
        assert small.prefill(TOKENS, OTHERS, kv_transfer_params={"max_load_tokens": 64})[0] == 64
        assert small.prefill(TOKENS, OTHERS, kv_transfer_params={"max_load_tokens": 0})[0] == 0
        wrong = {"max_load_tokens": "many", "max_offload_tokens": -1}
        assert small.prefill(TOKENS, OTHERS, kv_transfer_params=wrong)[0] == 256


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "b"},
        {"lora_request": object()},
        {"mm_features": [SimpleNamespace(identifier="image-1")]},
    ],
)
def test_other_requests_find_nothing(node: RunningNode, other: dict[str, object]) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        assert small.prefill(TOKENS, OTHERS, **other)[0] == 0


def test_other_weights_find_nothing(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        with SmallVllm(node.socket, weights=b"\x01" * 32) as other:
            assert other.prefill(TOKENS, OTHERS)[0] == 0


def test_without_a_daemon_nothing_is_waited_for(node: RunningNode) -> None:
    small = SmallVllm(node.socket)
    assert small.prefill(TOKENS, BLOCKS) == (0, set())
    with node.daemon(), small:
        assert small.prefill(TOKENS, BLOCKS) == (0, set())
        assert small.prefill(TOKENS, OTHERS) == (256, set())


def test_a_daemon_that_dies_before_the_copy_leaves_blocks_missing(node: RunningNode) -> None:
    daemon = node.daemon()
    with SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)

        def kill() -> None:
            daemon.kill()
            clients = small.clients
            await_true(lambda: not any(each.is_attached for each in clients), "both notice")

        missing = set(OTHERS[:NUM_FULL])
        assert small.prefill(TOKENS, OTHERS, before_copy=kill) == (256, missing)


def test_a_daemon_that_hangs_before_the_copy_is_not_waited_for(node: RunningNode) -> None:
    deadlines = ClientDeadlines(0.25, 0.5, 0.5, 0.1)
    with node.daemon() as daemon, SmallVllm(node.socket, deadlines=deadlines) as small:
        small.prefill(TOKENS, BLOCKS)
        with ExitStack() as hung:

            def hang() -> None:
                hung.enter_context(daemon.stopped())

            missing = set(OTHERS[:NUM_FULL])
            assert small.prefill(TOKENS, OTHERS, before_copy=hang) == (256, missing)
        await_true(lambda: small.prefill(TOKENS, OTHERS)[0] == 256, "it is asked again")
        assert not small.pool.references


def test_the_daemon_hears_what_came_of_its_plans(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        for _ in range(2):
            assert small.prefill(TOKENS, OTHERS)[0] == 256
        told = "kvtier_actual_seconds_total"
        await_true(lambda: node.metric(told, of="restore") > 0, "the restores are told")
        assert node.metric(told, of="first_token") >= node.metric(told, of="restore")


def test_a_request_is_offered_as_deep_as_is_advised_unless_it_says_itself(
    node: RunningNode,
) -> None:
    with node.daemon(policy__max_offload_tokens=130), SmallVllm(node.socket) as small:
        small.prefill(TOKENS, BLOCKS)
        assert node.stat()["tiers"]["cpu"]["blocks"] == 2
        others = [token + 1000 for token in TOKENS]
        small.prefill(others, BLOCKS, kv_transfer_params={"max_offload_tokens": 200})
        assert node.stat()["tiers"]["cpu"]["blocks"] == 5
        more = [token + 2000 for token in TOKENS]
        small.prefill(more, BLOCKS, kv_transfer_params={"max_offload_tokens": 0})
        assert node.stat()["tiers"]["cpu"]["blocks"] == 5


def test_a_load_that_ends_short_brings_what_it_has(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as small:
        small.prefill(TOKENS[:150], BLOCKS)
        assert small.prefill(TOKENS, OTHERS) == (128, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4, "and what it computed is offered"
