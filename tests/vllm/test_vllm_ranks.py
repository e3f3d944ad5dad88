"""Several ranks: a hit is what all of them have, and each copies its own."""

from collections.abc import Iterator

import pytest
import torch

from kvtier.connectors.vllm_common.settings import Role
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm
from tests.vllm.test_vllm_halves import BLOCKS, NUM_FULL, OTHERS, TOKENS

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def test_each_rank_gets_its_own_blocks_back(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, num_ranks=2) as small:
        assert small.prefill(TOKENS, BLOCKS) == (0, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 8
        before = small.content(BLOCKS[:NUM_FULL])
        assert small.prefill(TOKENS, OTHERS) == (256, set())
        after = small.content(OTHERS[:NUM_FULL])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not torch.equal(after[0], after[2]), "the ranks have different blocks"
        assert not small.pool.references
        node.await_idle()
        node.drop("cpu")
        assert small.prefill(TOKENS, OTHERS) == (256, set())
        after = small.content(OTHERS[:NUM_FULL])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        node.await_idle()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_request_counts_once_however_many_hold_and_copy_for_it(
    node: RunningNode, num_ranks: int
) -> None:
    """Bytes and blocks are each rank's own; tokens and seconds are the request's."""
    with node.daemon(), SmallVllm(node.socket, num_ranks=num_ranks) as small:
        small.prefill(TOKENS, BLOCKS)
        node.await_idle()
        node.drop("cpu")
        assert small.prefill(TOKENS, OTHERS)[0] == 256
        told = "kvtier_actual_seconds_total"
        await_true(lambda: node.metric(told, of="restore") > 0, "the restore is told")
        node.await_idle()
        counted = {
            name: node.metric(f"kvtier_{name}_tokens_total")
            for name in ("asked", "absent", "ordered", "loaded")
        }
        assert counted == {"asked": 512, "absent": 256, "ordered": 256, "loaded": 256}
        assert node.metric("kvtier_decisions_total") == 1
        # Each rank has told of both requests, and of a slow machine the first may be long ago.
        assert node.stat()["grown"]["lately"]["first_tokens"] <= 2
        moved = node.metric("kvtier_transfer_bytes_total", route="cpu_to_gpu", outcome="complete")
        assert moved == sum(each.nbytes for each in small.content(OTHERS[:NUM_FULL]))


def test_a_hit_is_what_all_ranks_have(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, num_ranks=2) as small:
        small.prefill(TOKENS, BLOCKS)
        node.await_idle()
        node.drop("cpu", "ssd")
        # The first rank keeps all, the second one two blocks.
        small.workers[1]._client = _Less(small.workers[1]._client, 2)
        small.prefill(TOKENS, BLOCKS)
        assert node.stat()["tiers"]["cpu"]["blocks"] == 6
        assert small.prefill(TOKENS, OTHERS) == (128, set())
        node.await_idle()


class _Less:
    """A client that stores only the first blocks; the rest is the real one's."""

    def __init__(self, client: object, most: int) -> None:
        self._client = client
        self._most = most

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def store(self, tenant: bytes, hashes: list[bytes], *rest: object, **more: object) -> int:
        stored: int = self._client.store(tenant, hashes[: self._most], *rest, **more)
        return stored


def test_one_rank_without_a_daemon_makes_no_hits(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, num_ranks=2) as small:
        small.prefill(TOKENS, BLOCKS)
        small.clients[2].close()
        await_true(lambda: not small.clients[2].is_attached, "it is closed")
        assert small.prefill(TOKENS, OTHERS) == (0, set())
        assert not small.pool.references
        node.await_idle()


def test_a_rank_that_cannot_copy_leaves_blocks_missing_for_all(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket, num_ranks=2) as small:
        small.prefill(TOKENS, BLOCKS)
        copier = small.clients[3]

        def cut() -> None:
            copier.close()
            await_true(lambda: not copier.is_attached, "it is closed")

        missing = set(OTHERS[:NUM_FULL])
        assert small.prefill(TOKENS, OTHERS, before_copy=cut) == (256, missing)
        node.await_idle()


def test_roles_are_kept(node: RunningNode) -> None:
    with (
        node.daemon(),
        SmallVllm(node.socket, role=Role.LOAD) as reader,
        SmallVllm(node.socket, role=Role.STORE) as writer,
    ):
        assert reader.prefill(TOKENS, BLOCKS) == (0, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 0
        writer.prefill(TOKENS, BLOCKS)
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4
        assert writer.prefill(TOKENS, OTHERS) == (0, set())
        # It was told that there is nothing, and asks again a second later.
        await_true(lambda: reader.prefill(TOKENS, OTHERS) == (256, set()), "the reader finds them")
        node.await_idle()
