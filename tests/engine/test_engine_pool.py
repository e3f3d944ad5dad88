"""The block pool: references, the prefix cache, eviction, bytes."""

import random

import numpy as np
import pytest
import torch

from kvtier.core.identity import BlockHash
from kvtier.engine.pool import BlockPool, PoolShape

SHAPE = PoolShape(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=2, dtype=torch.float32)
ROOT = BlockHash(bytes(16))


def _hash(name: str) -> BlockHash:
    return BlockHash(name.encode().ljust(16, b"\0"))


def _chain(pool: BlockPool, *names: str) -> list[int]:
    """Publish a chain of blocks; those known already are shared."""
    hashes = [_hash(name) for name in names]
    known = pool.match(hashes, len(hashes))
    blocks = pool.acquire(hashes[:known])
    fresh = pool.allocate(len(names) - known)
    assert fresh is not None
    blocks += fresh
    for block, block_hash, parent in zip(blocks, hashes, [ROOT, *hashes], strict=False):
        pool.publish(block, block_hash, parent)
    pool.check()
    return blocks


def _cached(pool: BlockPool, *names: str) -> list[bool]:
    return [pool.match([_hash(name)], 1) == 1 for name in names]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(SHAPE, 4)
    blocks = pool.allocate(3)
    assert blocks is not None
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.release(blocks)
    assert pool.num_available == 4
    pool.check()


def test_the_least_recently_used_chain_goes_first_and_leaves_before_parents() -> None:
    pool = BlockPool(SHAPE, 6)
    pool.release(_chain(pool, "a", "a1", "a2"))
    pool.release(_chain(pool, "b", "b1"))
    pool.release(_chain(pool, "a", "a1"))  # used again, without its leaf
    assert pool.allocate(2) is not None  # one was free
    assert _cached(pool, "a", "a1", "a2", "b", "b1") == [True, True, False, True, True]
    assert pool.allocate(1) is not None
    assert _cached(pool, "a", "a1", "b", "b1") == [True, True, True, False]
    assert pool.allocate(3) is not None
    assert pool.allocate(1) is None
    pool.check()


def test_a_parent_waits_for_a_child_that_a_store_holds() -> None:
    pool = BlockPool(SHAPE, 4)
    chain = _chain(pool, "a", "a1", "a2")
    pool.retain(chain[2:])
    pool.release(chain)
    pool.release(_chain(pool, "b"))
    assert pool.allocate(1) is not None  # b goes, though it was used last: a and a1 have a child
    assert _cached(pool, "a", "a1", "a2", "b") == [True, True, True, False]
    pool.check()
    assert pool.allocate(2) is not None  # nothing else is left
    assert _cached(pool, "a", "a1", "a2") == [False, False, True]
    pool.check()
    pool.release(chain[2:])
    assert pool.allocate(1) == [chain[2]]
    pool.check()


def test_a_block_in_use_is_never_handed_out() -> None:
    pool = BlockPool(SHAPE, 3)
    used = _chain(pool, "a", "a1")
    assert pool.allocate(2) is None
    again = pool.acquire([_hash("a")])
    pool.release(used)
    assert pool.allocate(2) is not None
    assert pool.allocate(1) is None
    assert _cached(pool, "a", "a1") == [True, False]
    pool.release(again)
    assert pool.allocate(1) == again


def test_a_second_block_of_the_same_content_is_no_second_entry() -> None:
    pool = BlockPool(SHAPE, 3)
    first = _chain(pool, "a")
    second = pool.allocate(1)
    assert second is not None
    pool.publish(second[0], _hash("a"), ROOT)
    pool.release(second)
    pool.check()
    assert pool.counts().free == 2
    assert pool.acquire([_hash("a")]) == first


def test_marks_last_as_long_as_the_content() -> None:
    pool = BlockPool(SHAPE, 1)
    (block,) = _chain(pool, "a")
    pool.mark(block)
    assert pool.is_marked(block, _hash("a"))
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert not pool.is_marked(block, _hash("a"))


def test_many_hits_do_not_grow_the_pool() -> None:
    pool = BlockPool(SHAPE, 8)
    for _ in range(200):
        pool.release(_chain(pool, "a", "b"))
    assert len(pool._leaves) <= 2 * 8 + 1
    pool.check()


def test_random_use_keeps_the_invariants() -> None:
    seed = 20240607
    chance = random.Random(seed)
    pool = BlockPool(SHAPE, 12)
    held: list[list[int]] = []
    for _ in range(1500):
        if held and chance.random() < 0.5:
            blocks = held.pop(chance.randrange(len(held)))
            cut = chance.randrange(len(blocks) + 1)
            pool.release(blocks[:cut])  # a prefix first, then its end, as stores let go
            pool.release(blocks[cut:])
        else:
            names = [f"{chance.randrange(3)}"]
            for _ in range(chance.randrange(4)):
                names.append(f"{names[-1]}{chance.randrange(3)}")
            hashes = [_hash(name) for name in names]
            if pool.num_available >= len(names) and pool.match(hashes, 9) <= pool.num_available:
                known = pool.acquire(hashes[: pool.match(hashes, 9)])
                can_hold = pool.num_available >= len(names) - len(known)
                if can_hold:
                    held.append(_chain(pool, *names))
                pool.release(known)
        if chance.random() < 0.01:
            pool.drop()
        pool.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    shape = PoolShape(num_layers=2, block_tokens=4, num_kv_heads=1, head_dim=2, dtype=dtype)
    pool = BlockPool(shape, 3)
    assert shape.block_bytes == pool.tensor[0].numel() * dtype.itemsize
    pool.tensor[1] = torch.arange(pool.tensor[1].numel()).view(pool.tensor[1].shape)
    content = bytearray(shape.block_bytes)
    pool.read_block(1, memoryview(content))
    assert bytes(content) == pool.block_bytes(1).tobytes()
    pool.write_block(2, memoryview(bytes(content)))
    assert torch.equal(pool.tensor[2], pool.tensor[1])
    assert not pool.tensor[0].any()
    pool.block_bytes(0)[:] = np.frombuffer(content, dtype=np.uint8)
    assert torch.equal(pool.tensor[0], pool.tensor[1])


def test_poison_marks_what_was_handed_out() -> None:
    pool = BlockPool(SHAPE, 2, is_poisoned=True)
    blocks = pool.allocate(1)
    assert blocks is not None
    assert pool.tensor[blocks[0]].isnan().all()
    assert not pool.tensor[1 - blocks[0]].isnan().any()
