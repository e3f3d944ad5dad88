"""A daemon that knows very many blocks stays small."""

import itertools
from collections.abc import Iterator

import pytest
import redis

from kvtier.client import ClientDeadlines
from kvtier.core.identity import BlockHash, chain_root, hash_blocks
from kvtier.core.limits import EXISTENCE_CHECK_BLOCKS_MAX
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import BLOCK_TOKENS, PatternEngine

pytestmark = [pytest.mark.long, pytest.mark.redis]

NUM_CHAINS = 250
CHAIN_BLOCKS = 1000
PREFIX = "memory:"
BLOCK_LIMIT_BYTES = 320
"""120 bytes a block in the index, and up to 200 for the memory of its uses."""
DEADLINES = ClientDeadlines(lookup_s=30)
assert CHAIN_BLOCKS <= EXISTENCE_CHECK_BLOCKS_MAX, "one lookup learns of one whole chain"


def chains(engine: PatternEngine) -> Iterator[list[BlockHash]]:
    root = chain_root(engine.space.digest, engine.tenant)
    for number in range(NUM_CHAINS):
        tokens = [number] * (BLOCK_TOKENS * CHAIN_BLOCKS)
        yield hash_blocks(root, tokens, BLOCK_TOKENS)


def test_a_quarter_of_a_million_blocks_in_the_index(redis_server: str) -> None:
    """Blocks that a shared server has need no bytes here: each is a row of the index alone."""
    settings = {"remote.url": redis_server, "remote.key_prefix": PREFIX, "remote.deadline": "20s"}
    with work_directory() as directory:
        node = RunningNode(directory, settings)
        with (
            redis.Redis.from_url(redis_server, socket_timeout=60) as server,
            node.daemon() as daemon,
            PatternEngine(node.socket, deadlines=DEADLINES) as engine,
        ):
            before, arena = daemon.memory_bytes()
            assert arena <= 17 << 20
            for chain in chains(engine):
                server.mset({f"{PREFIX}{{{block_hash.hex()}}}": b"" for block_hash in chain})
                tiers = engine.client.lookup(engine.tenant, chain, 0).tiers
                assert len(tiers) == CHAIN_BLOCKS
            status = node.stat()
            assert status["tiers"]["remote"]["blocks"] == NUM_CHAINS * CHAIN_BLOCKS
            after, _ = daemon.memory_bytes()
            print(f"{before / 1e6:.0f} MB empty, {after / 1e6:.0f} MB with all these blocks")
            assert after - before < BLOCK_LIMIT_BYTES * NUM_CHAINS * CHAIN_BLOCKS
            known = next(itertools.islice(chains(engine), NUM_CHAINS // 2, None))
            assert engine.client.lookup(engine.tenant, known, 0).reason == "complete"
            server.flushdb()
