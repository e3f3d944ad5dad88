"""RedisTier and a real Redis Cluster of six nodes, primaries of which die under load."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from redis.crc import key_slot

from kvtier.core.identity import EVERYTHING, BlockHash, Selection, tenant_digest
from kvtier.errors import TierError
from kvtier.testing.block import make_chain, payload_of, read_of
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.tier_contract import TierContract, fetch, soon, store
from kvtier.tiers.base import BlockWrite, Health, HealthState, MissReason, Tier
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from tests.integration.redis_cluster import RedisCluster

pytestmark = [pytest.mark.redis, pytest.mark.slow]

TIMEOUT_S = 0.3
DEADLINE_S = 0.6
SLACK_S = 3.0
"""What a call may take beyond its time on a machine that other tests keep busy."""

FAILOVER_S = 15.0
"""The nodes' own part: about 2 s when the machine is idle."""

OPTIONS = RedisOptions(timeout_s=TIMEOUT_S, value_bytes=64 << 10)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RedisCluster]:
    with work_directory() as directory, RedisCluster(directory).running() as nodes:
        yield nodes


@pytest.fixture
def cluster(nodes: RedisCluster) -> Iterator[RedisCluster]:
    yield nodes
    for port in nodes.ports:
        if not nodes.child(port).is_running:
            nodes.start(port)
    nodes.await_whole()


@pytest.fixture
def remote(cluster: RedisCluster) -> Iterator[RedisTier]:
    tier = RedisTier(cluster.url, OPTIONS)
    await_true(lambda: _is_up(tier), "every primary is in use", FAILOVER_S)
    tier.purge(EVERYTHING, soon())
    yield tier
    tier.close()


def _is_up(tier: RedisTier) -> bool:
    with contextlib.suppress(TierError):
        tier.health_check(soon())
        return tier.health() == Health()
    return False


class TestRedisTierInACluster(TierContract):
    @pytest.fixture
    def tier(self, remote: RedisTier) -> Tier:
        return remote


def owner_of(cluster: RedisCluster, port: int) -> Callable[[BlockHash], int]:
    """Return what tells the port of a block's primary, as the node at ``port`` sees it now."""
    ranges = cluster.slots(port)

    def owner(block_hash: BlockHash) -> int:
        slot = key_slot(b"kvtier:{%s}" % block_hash.hex().encode())
        return next(port for (first, last), port in ranges.items() if first <= slot <= last)

    return owner


def test_blocks_are_spread_and_never_span_nodes(remote: RedisTier, cluster: RedisCluster) -> None:
    blocks = make_chain(range(40), 150_000)
    store(remote, *blocks)
    primaries = cluster.primaries()
    assert len(primaries) == 3
    sizes = [cluster.ask(port, "DBSIZE") for port in primaries]
    assert sum(sizes) == 40 * 3, "three values a block"
    assert all(size > 0 and size % 3 == 0 for size in sizes)
    assert fetch(remote, *blocks) == [None] * 40


def test_a_tenant_is_purged_from_every_node(remote: RedisTier, cluster: RedisCluster) -> None:
    tenants = [tenant_digest(name) for name in ("one", "two")]
    chains = [make_chain(range(30), 100_000, tenant=tenant) for tenant in tenants]
    for chain in chains:
        store(remote, *chain)
    removed = remote.purge(Selection(tenant=tenants[0]), soon())
    assert (removed.num_blocks, removed.num_bytes) == (30, 3_000_000)
    assert fetch(remote, *chains[0]) == [MissReason.ABSENT] * 30
    assert fetch(remote, *chains[1]) == [None] * 30
    remote.purge(EVERYTHING, soon())
    assert [cluster.ask(port, "DBSIZE") for port in cluster.primaries()] == [0, 0, 0]


@dataclass
class Load:
    """Clients that read and write all the time, and what they saw."""

    tier: RedisTier
    blocks: list[BlockWrite]
    seed: int
    served: dict[BlockHash, float] = field(default_factory=dict)
    """When each block was last served."""
    slowest_s: float = 0.0
    num_calls: int = 0

    @contextlib.contextmanager
    def running(self, num_clients: int = 3) -> Iterator["Load"]:
        is_over = threading.Event()
        with ThreadPoolExecutor(num_clients) as threads:
            clients = [
                threads.submit(self._run, random.Random(self.seed + number), is_over)
                for number in range(num_clients)
            ]
            try:
                yield self
            finally:
                is_over.set()
                for client in clients:
                    client.result(20)

    def served_since(self, start_s: float, hashes: set[BlockHash]) -> bool:
        """Tell whether each of these has been served since then."""
        return all(self.served.get(each, 0) > start_s for each in hashes)

    def _run(self, dice: random.Random, is_over: threading.Event) -> None:
        while not is_over.is_set():
            some = dice.sample(self.blocks, 8)
            reads = [read_of(block) for block in some]
            started_s = time.monotonic()
            deadline_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
            with contextlib.suppress(TierError):
                if dice.random() < 0.3:
                    self.tier.write(some, deadline_ns)
                    continue
                for read, result in zip(reads, self.tier.read(reads, deadline_ns), strict=True):
                    if not isinstance(result, MissReason):
                        assert bytes(read.into) == payload_of(result)
                        self.served[read.block_hash] = time.monotonic()
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_s)
            self.num_calls += 1


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_primary_is_lost_under_load(remote: RedisTier, cluster: RedisCluster, how: str) -> None:
    """The others go on serving at once, and its replica serves its part soon after it took over."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    blocks = make_chain(range(45), 100_000)
    store(remote, *blocks)
    victim, *others = cluster.primaries()
    owner = owner_of(cluster, others[0])
    hashes = {block.header.block_hash for block in blocks}
    lost = {each for each in hashes if owner(each) == victim}
    assert lost
    assert hashes - lost
    with contextlib.ExitStack() as stack:
        load = stack.enter_context(Load(remote, blocks, seed).running())
        await_true(lambda: load.served_since(0, hashes), "all are served")
        lost_s = time.monotonic()
        if how == "killed":
            cluster.child(victim).kill()
        else:
            stack.enter_context(cluster.child(victim).stopped())
        await_true(lambda: remote.health().state is HealthState.DEGRADED, "health tells")
        assert "1 of 3 primaries are out" in remote.health().reason
        degraded_s = time.monotonic()
        await_true(lambda: load.served_since(degraded_s, hashes - lost), "the others are served")
        served_s = time.monotonic()
        await_true(
            lambda: len(set(cluster.primaries()) - {victim}) == 3, "it is replaced", FAILOVER_S
        )
        replaced_s = time.monotonic()
        await_true(lambda: load.served_since(replaced_s, hashes), "all are served again")
        print(
            f"health told after {degraded_s - lost_s:.2f} s; the others' blocks were all served "
            f"{served_s - degraded_s:.2f} s later; replaced after {replaced_s - lost_s:.2f} s; all "
            f"served {time.monotonic() - replaced_s:.2f} s later; the slowest of "
            f"{load.num_calls} calls took {load.slowest_s:.2f} s"
        )
        await_true(lambda: remote.health() == Health(), "health tells")
    assert load.slowest_s < DEADLINE_S + SLACK_S
    assert remote.usage().detail["partial_faults"] > 0


def test_a_handover_is_followed(remote: RedisTier, cluster: RedisCluster) -> None:
    """A node that says that it has moved is believed in the background; until then: a miss."""
    blocks = make_chain(range(20), 10_000)
    store(remote, *blocks)
    before = set(cluster.primaries())
    replica = next(port for port in cluster.ports if port not in before)
    _hand_over(cluster, replica)
    await_true(lambda: _serves(remote, blocks), "it is followed")
    await_true(lambda: remote.usage().generation > 0, "the change of the primary is noticed")


def test_what_a_lost_primary_has_is_unknown_and_not_absent(
    remote: RedisTier, cluster: RedisCluster
) -> None:
    blocks = make_chain(range(20))
    store(remote, *blocks)
    hashes = [block.header.block_hash for block in blocks]
    frozen = cluster.primaries()[0]
    owners = [owner_of(cluster, frozen)(each) for each in hashes]
    with cluster.child(frozen).stopped():
        expected = [None if owner == frozen else True for owner in owners]
        assert list(remote.contains(hashes, soon())) == expected
    await_true(lambda: _is_up(remote), "every primary is in use", FAILOVER_S)


def _hand_over(cluster: RedisCluster, replica: int) -> None:
    """Make a replica a primary; Redis gives up what it was asked after 5 s on a busy machine."""
    for _ in range(4):
        cluster.ask(replica, "CLUSTER", "FAILOVER")
        with contextlib.suppress(AssertionError):
            await_true(lambda: replica in cluster.primaries(), "it has taken over", 6)
            return
    pytest.fail("no handover in four tries")


def _serves(tier: RedisTier, blocks: list[BlockWrite]) -> bool:
    with contextlib.suppress(TierError):
        tier.write(blocks, soon())
        return fetch(tier, *blocks) == [None] * len(blocks)
    return False


def test_no_node_answers_and_then_all_do(remote: RedisTier, cluster: RedisCluster) -> None:
    block = make_chain([1])[0]
    store(remote, block)
    with contextlib.ExitStack() as stack:
        for port in cluster.ports:
            stack.enter_context(cluster.child(port).stopped())
        for _ in range(3):
            started_s = time.monotonic()
            with contextlib.suppress(TierError):
                assert fetch(remote, block) != [None]
            assert time.monotonic() - started_s < TIMEOUT_S + SLACK_S
        hashes = [each.header.block_hash for each in make_chain(range(20))]
        with contextlib.suppress(TierError):
            remote.contains(hashes, soon())
        with pytest.raises(TierError):
            remote.contains(hashes, soon())
        assert remote.health().state is HealthState.OUT
    await_true(lambda: _is_up(remote), "every primary is in use", FAILOVER_S)


def test_one_node_alone_is_refused_with_the_remedy(cluster: RedisCluster) -> None:
    """It would serve a third of the blocks, and never tell."""
    tier = RedisTier(f"redis://127.0.0.1:{cluster.ports[0]}", OPTIONS)
    for _ in range(2):
        with pytest.raises(TierError, match=r"use redis\+cluster:// in remote.url"):
            tier.health_check(soon())
        assert tier.health().state is HealthState.OUT
    tier.close()


def test_a_wrong_password_is_told_from_a_cluster_that_is_away(cluster: RedisCluster) -> None:
    tier = RedisTier(cluster.url.replace("://", "://:wrong@"), OPTIONS)
    for _ in range(2):
        with pytest.raises(TierError, match="it rejects the user or the password, "):
            tier.health_check(soon())
    tier.close()


def test_a_purge_does_not_pass_over_a_slot_that_is_on_its_way(
    remote: RedisTier, cluster: RedisCluster
) -> None:
    blocks = make_chain(range(30), 100_000)
    store(remote, *blocks)
    head = "kvtier:{" + blocks[0].header.block_hash.hex() + "}"
    slot = key_slot(head.encode())
    slots = cluster.slots(cluster.ports[0])
    (owner,) = (port for (first, last), port in slots.items() if first <= slot <= last)
    other = next(port for port in cluster.primaries() if port != owner)
    names = {port: cluster.name(port) for port in (owner, other)}
    cluster.ask(other, "CLUSTER SETSLOT", slot, "IMPORTING", names[owner])
    cluster.ask(owner, "CLUSTER SETSLOT", slot, "MIGRATING", names[other])
    try:
        # The head goes ahead, and its other values stay: there is no telling whose they are.
        cluster.ask(owner, "MIGRATE", "127.0.0.1", str(other), head, "0", "1000")
        with pytest.raises(TierError, match="not removed: slots are on their way"):
            remote.purge(EVERYTHING, soon())
    finally:
        for port in (other, owner):
            cluster.ask(port, "CLUSTER SETSLOT", slot, "STABLE")
            cluster.ask(port, "FLUSHALL")
