"""Blocks for tests whose bytes are a function of their full identity.

A stale, torn, swapped or foreign block is thus detected: its bytes do not match its header.
"""

import hashlib
import mmap
from collections.abc import Sequence
from dataclasses import replace

from kvtier.core.identity import (
    NO_TENANT,
    BlockHash,
    BlockHeader,
    chain_root,
    hash_blocks,
    payload_checksum,
)
from kvtier.tiers.base import BlockRead, BlockWrite

__all__ = ["TEST_KEY_SPACE", "aligned_memory", "make_block", "make_chain", "payload_of", "read_of"]

TEST_KEY_SPACE = b"test key space.."
"""A key space for tests."""


def payload_of(header: BlockHeader) -> bytes:
    """Return the only valid payload of a header."""
    return hashlib.shake_128(header.identity()).digest(header.payload_bytes)


def make_block(
    number: int,
    payload_bytes: int = 5000,
    *,
    key_space: bytes = TEST_KEY_SPACE,
    tenant: bytes = NO_TENANT,
) -> BlockWrite:
    """Return the first block of a prompt that consists of ``number``, ready to write."""
    return make_chain([number], payload_bytes, key_space=key_space, tenant=tenant)[0]


def make_chain(
    numbers: Sequence[int],
    payload_bytes: int = 5000,
    *,
    key_space: bytes = TEST_KEY_SPACE,
    tenant: bytes = NO_TENANT,
) -> list[BlockWrite]:
    """Return the blocks of a prompt of these tokens, one token per block."""
    root = chain_root(key_space, tenant)
    hashes = hash_blocks(root, numbers, block_tokens=1)
    parents = [root, *hashes]
    return [
        _block(BlockHeader(key_space, tenant, block_hash, parent, position, payload_bytes))
        for position, (block_hash, parent) in enumerate(zip(hashes, parents, strict=False))
    ]


def _block(header: BlockHeader) -> BlockWrite:
    payload = payload_of(header)
    checked = replace(header, checksum=payload_checksum(header, payload))
    return BlockWrite(checked, memoryview(payload))


def read_of(block: BlockWrite, into: memoryview | None = None) -> BlockRead:
    """Return a read of a block, into its own memory by default."""
    header = block.header
    if into is None:
        into = memoryview(bytearray(header.payload_bytes))
    return BlockRead(
        BlockHash(header.block_hash),
        header.key_space,
        header.tenant,
        header.payload_bytes,
        into,
    )


def aligned_memory(size_bytes: int) -> memoryview:
    """Return page-aligned memory, like the slots of the arena."""
    return memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]
