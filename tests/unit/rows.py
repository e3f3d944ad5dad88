"""Rows of an index, for tests of what works on them."""

import numpy as np

from kvtier.core.identity import NO_TENANT, PACKED_HEADER, BlockHeader, Headers
from kvtier.core.index import BlockIndex, NewBlocks, Scope
from kvtier.core.table import Rows, as_keys
from kvtier.testing.block import TEST_KEY_SPACE, make_chain

SCOPE = Scope(TEST_KEY_SPACE, NO_TENANT)


def add(index: BlockIndex, headers: list[BlockHeader], first: int = 0) -> Rows:
    """Make a chain known, and return its rows."""
    return index.add(
        NewBlocks(
            keys=as_keys(b"".join(h.block_hash for h in headers)),
            parents=as_keys(b"".join(h.parent_hash for h in headers)),
            first_position=first,
            scope=index.scope_id(SCOPE),
            payload_bytes=5000,
        )
    )


def packed(headers: list[BlockHeader]) -> Headers:
    return np.frombuffer(b"".join(header.pack() for header in headers), PACKED_HEADER)


def chain(*numbers: int) -> list[BlockHeader]:
    return [block.header for block in make_chain(numbers)]
