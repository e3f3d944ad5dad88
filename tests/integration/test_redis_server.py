"""RedisTier against a real server: what others do to its values, and what the server does."""

import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from kvtier.core.identity import EVERYTHING, HEADER_BYTES, NO_TENANT, Selection
from kvtier.errors import StartError, TierError, TierTimeout
from kvtier.testing.block import make_block, make_chain, read_of
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, Health, HealthState, MissReason, WriteOutcome
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from kvtier.tiers.seal import Codec, Stamp

pytestmark = pytest.mark.redis
PREFIX = "test[1]*:"
"""With characters that mean something in a pattern."""


@pytest.fixture
def client(redis_server: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server, socket_timeout=60) as client:
        client.flushall()
        yield client


@pytest.fixture
def tier(redis_server: str, client: redis.Redis) -> Iterator[RedisTier]:
    tier = RedisTier(
        redis_server, RedisOptions(key_prefix=PREFIX, ttl_s=100, timeout_s=5, now_s=lambda: 1000.5)
    )
    yield tier
    tier.close()


def key_of(block: BlockWrite) -> str:
    return PREFIX + "{" + block.header.block_hash.hex() + "}"


def value_of(block: BlockWrite, payload: bytes | None = None, written_s: int = 0) -> bytes:
    """Return what a plain tier stores for a block, or what it would for another payload."""
    stamp = Stamp(Codec.PLAIN, 0, written_s, bytes(12)).pack()
    return block.header.pack() + stamp + (block.payload if payload is None else payload)


def test_one_value_a_block_and_it_expires(tier: RedisTier, client: redis.Redis) -> None:
    block = make_block(1)
    store(tier, block)
    assert client.keys() == [key_of(block).encode()]
    assert client.get(key_of(block)) == value_of(block, written_s=1000)
    assert 0 < client.pttl(key_of(block)) <= 100_000


def test_storing_again_renews(tier: RedisTier, client: redis.Redis) -> None:
    block = make_block(1)
    store(tier, block)
    client.pexpire(key_of(block), 5_000)
    store(tier, block)
    assert client.pttl(key_of(block)) > 50_000


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", MissReason.HEADER),
        (b"not a block", MissReason.HEADER),
        (b"x" * 5128, MissReason.HEADER),
        (value_of(make_block(1), bytes(5000)), MissReason.CHECKSUM),
        (value_of(make_block(1))[:-1], MissReason.LENGTH),
        (value_of(make_block(1)) + b"x", MissReason.LENGTH),
        (value_of(make_block(2)), MissReason.IDENTITY),
    ],
    ids=["empty", "short", "text", "other bytes", "cut", "longer", "another block"],
)
def test_a_value_that_was_changed_is_a_miss_and_unlinked(
    tier: RedisTier, client: redis.Redis, value: bytes, reason: MissReason
) -> None:
    block, other = make_block(1), make_block(3)
    store(tier, other)
    client.set(key_of(block), value)
    assert fetch(tier, block, other) == [reason, None]
    assert client.exists(key_of(block)) == 0
    store(tier, block)
    assert fetch(tier, block) == [None]


def test_any_flipped_byte_is_found(tier: RedisTier, client: redis.Redis) -> None:
    block = make_block(1, 50)
    value = value_of(block)
    for position in [*range(HEADER_BYTES - 24), *range(HEADER_BYTES, len(value))]:
        damaged = bytearray(value)
        damaged[position] ^= 4
        client.set(key_of(block), bytes(damaged))
        assert fetch(tier, block) != [None], position


def test_a_key_of_another_type_is_a_miss_and_unlinked(tier: RedisTier, client: redis.Redis) -> None:
    block, other = make_block(1), make_block(2)
    store(tier, other)
    client.lpush(key_of(block), "x")
    assert fetch(tier, block, other) == [MissReason.HEADER, None]
    store(tier, block)
    assert fetch(tier, block) == [None]
    client.unlink(key_of(block))
    client.lpush(key_of(block), "x")
    assert tier.remove([block.header.block_hash], soon()).num_blocks == 1
    client.lpush(key_of(block), "x")
    store(tier, block)
    assert fetch(tier, block) == [None]


def test_clear_leaves_what_is_not_ours(tier: RedisTier, client: redis.Redis) -> None:
    blocks = make_chain(range(1200), 10)
    store(tier, *blocks)
    others = [b"other", PREFIX.encode() + b"note", b"test1:" + b"a" * 32]
    for key in others:
        client.set(key, "x")
    removed = tier.purge(EVERYTHING, soon())
    assert (removed.num_blocks, removed.num_bytes) == (1200, 12_000)
    assert sorted(client.keys()) == sorted(others)


def test_large_batches_are_cut(tier: RedisTier) -> None:
    blocks = make_chain(range(5), 7 << 20)
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 5


def test_a_full_server_rejects(tier: RedisTier, client: redis.Redis) -> None:
    kept = make_block(1)
    store(tier, kept)
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    try:
        report = tier.write([make_block(2), kept], soon())
        assert report.outcomes == (WriteOutcome.REJECTED, WriteOutcome.STORED)
        assert fetch(tier, kept) == [None]
        tier.health_check(soon())
        assert tier.health().state is HealthState.DEGRADED
        assert "full: maxmemory reached" in tier.health().reason
        before = client.info("stats")["total_net_input_bytes"]
        assert tier.write([make_block(3, 1 << 20)], soon()).outcomes == (WriteOutcome.REJECTED,)
        assert client.info("stats")["total_net_input_bytes"] - before < 10_000, "it is not sent"
    finally:
        client.config_set("maxmemory", 0)
    store(tier, make_block(2))
    assert tier.health() == Health()


def test_a_replica_rejects_and_serves(tier: RedisTier, client: redis.Redis) -> None:
    kept = make_block(1)
    store(tier, kept)
    client.replicaof("127.0.0.1", "1")
    try:
        assert tier.write([make_block(2)], soon()).outcomes == (WriteOutcome.REJECTED,)
        assert tier.health().state is HealthState.DEGRADED
        assert "read-only: it is a replica" in tier.health().reason
        assert fetch(tier, kept) == [None]
        tier.health_check(soon())
        assert tier.health().state is HealthState.DEGRADED
    finally:
        client.replicaof("NO", "ONE")
    tier.health_check(soon())
    assert tier.health() == Health()
    store(tier, make_block(2))


def test_a_removal_that_is_refused_is_not_one_of_nothing(
    tier: RedisTier, client: redis.Redis
) -> None:
    kept = make_block(1)
    store(tier, kept)
    client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(TierError, match="not removed: read-only: it is a replica"):
            tier.purge(EVERYTHING, soon())
        with pytest.raises(TierError, match="not removed: read-only: it is a replica"):
            tier.remove([kept.header.block_hash], soon())
    finally:
        client.replicaof("NO", "ONE")
    assert tier.purge(EVERYTHING, soon()).num_blocks == 1
    assert client.dbsize() == 0


def test_forged_heads_that_claim_many_values_are_purged(
    tier: RedisTier, client: redis.Redis
) -> None:
    for number in range(5):
        forged = make_block(number)
        header = replace(forged.header, payload_bytes=(1 << 32) - 1)
        client.set(key_of(forged), header.pack() + bytes(33))
    store(tier, make_block(9))
    assert tier.purge(EVERYTHING, soon()).num_blocks == 6
    assert client.dbsize() == 0


def test_goes_on_after_the_server_dropped_the_link(tier: RedisTier, client: redis.Redis) -> None:
    block = make_block(1)
    store(tier, block)
    for link in client.client_list():
        if link["id"] != str(client.client_id()):
            client.client_kill_filter(_id=link["id"])
    assert fetch(tier, block) == [None]


def timers_to(port: int) -> dict[str, str]:
    """Return the kernel's timer of each connection to a port, by the address of our end."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {words[1]: words[5] for words in lines if words[2] == f"0100007F:{port:04X}"}


def test_an_idle_link_is_kept_alive(tier: RedisTier, redis_server: str) -> None:
    """Whatever is on the way drops a silent one without telling either end."""
    port = urlsplit(redis_server).port
    assert port
    before = timers_to(port)
    store(tier, make_block(1))
    (own,) = timers_to(port).keys() - before.keys()
    kind, _, ticks = timers_to(port)[own].partition(":")
    assert kind == "02", "that of keepalive"
    assert int(ticks, 16) <= 10 * os.sysconf("SC_CLK_TCK")


def test_requests_walk_no_keys_and_wait_for_no_memory_to_be_freed(
    tier: RedisTier, client: redis.Redis
) -> None:
    """KEYS and SCAN are for a purge alone, and DEL, which holds up everyone, for nothing."""
    client.config_resetstat()
    blocks = [make_block(number) for number in range(4)]
    store(tier, *blocks)
    store(tier, *blocks)
    tier.contains([block.header.block_hash for block in blocks], soon())
    client.set(key_of(blocks[0]), b"not a block")
    assert fetch(tier, *blocks) == [MissReason.HEADER, None, None, None]
    tier.remove([block.header.block_hash for block in blocks], soon())
    used = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    assert {"get", "set", "unlink"} <= used
    assert not used & {"keys", "scan", "del", "flushall", "flushdb"}


def test_a_server_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tier = RedisTier(
            f"redis://:x@127.0.0.1:{silent.getsockname()[1]}", RedisOptions(timeout_s=0.2)
        )
        started = time.monotonic()
        with pytest.raises(TierTimeout):
            fetch(tier, make_block(1))
        assert time.monotonic() - started < 4
        tier.close()


def test_waits_no_longer_than_the_deadline(redis_server: str, client: redis.Redis) -> None:
    tier = RedisTier(redis_server, RedisOptions(key_prefix=PREFIX, timeout_s=20))
    store(tier, make_block(1))
    client.client_pause(4_000)
    started = time.monotonic()
    with pytest.raises(TierTimeout):
        tier.read([read_of(make_block(1))], time.monotonic_ns() + 200_000_000)
    assert time.monotonic() - started < 3.5
    assert fetch(tier, make_block(1)) == [None]  # and the late reply is nobody's
    tier.close()


def test_a_server_that_is_not_there_is_a_fault_of_the_call() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        tier = RedisTier(f"redis://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(TierError):
            tier.contains([make_block(1).header.block_hash], soon())
        tier.close()


def test_several_threads_share_the_connections(tier: RedisTier) -> None:
    blocks = make_chain(range(20))
    store(tier, *blocks)
    verdicts: list[list[MissReason | None]] = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(fetch(tier, *blocks))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert verdicts == [[None] * 20] * 8


@pytest.mark.parametrize(
    "password",
    ["simple", "p@ss:w/rd#?&", "percent%41%zz", "ünï"],
    ids=["simple", "punctuation", "percent", "unicode"],
)
def test_logs_in_as_a_user_and_never_tells_the_password(
    redis_server: str, client: redis.Redis, password: str
) -> None:
    written = password.replace("%", "%25") if "%41" in password else password
    client.acl_setuser(
        "kv", enabled=True, passwords=[f"+{password}"], keys=["*"], commands=["+@all"]
    )
    place = redis_server.rpartition("@")[2]
    tier = RedisTier(f"redis://kv:{written}@{place}", RedisOptions(timeout_s=5))
    store(tier, make_block(1))
    assert fetch(tier, make_block(1)) == [None]
    assert password not in repr(tier) + str(tier.usage())
    client.acl_setuser("kv", enabled=True, reset_passwords=True, passwords=["+changed"])
    tier.close()
    tier = RedisTier(f"redis://kv:{written}@{place}", RedisOptions(timeout_s=5))
    with pytest.raises(TierError) as raised:
        fetch(tier, make_block(1))
    assert password not in repr(raised.value)
    tier.close()


@pytest.mark.parametrize("url", ["http://x:secret@y", "localhost:6379", "", "redis://u:secret@h:x"])
def test_a_bad_url_is_named_without_its_secrets(url: str) -> None:
    with pytest.raises(StartError) as raised:
        RedisTier(url)
    assert raised.value.field == "remote.url"
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_unix_socket(redis_server: str, client: redis.Redis) -> None:
    path = client.config_get("unixsocket")["unixsocket"]
    password = redis_server.split("@", maxsplit=1)[0].rpartition(":")[2]
    tier = RedisTier(f"unix://:{password}@{path}", RedisOptions(timeout_s=5))
    store(tier, make_block(1))
    assert fetch(tier, make_block(1)) == [None]
    tier.close()


def test_the_documented_rights_are_enough(redis_server: str, client: redis.Redis) -> None:
    page = (Path(__file__).parents[2] / "docs/operations/redis.md").read_text()
    (line,) = re.findall("^ACL SETUSER kvtier (.*)$", page, flags=re.MULTILINE)
    client.execute_command("ACL SETUSER", "kvtier", *line.split())
    client.acl_log_reset()
    place = redis_server.rpartition("@")[2]
    tier = RedisTier(f"redis://kvtier:PASSWORD@{place}", RedisOptions(timeout_s=5))
    blocks = make_chain(range(3), 3 << 20)
    store(tier, *blocks)
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3
    hashes = [block.header.block_hash for block in blocks]
    assert tier.contains(hashes, soon()) == [True] * 3
    tier.health_check(soon())
    assert tier.remove(hashes[:1], soon()).num_blocks == 1
    assert tier.purge(Selection(tenant=NO_TENANT), soon()).num_blocks == 2
    assert tier.health() == Health()
    refused = client.acl_log()
    assert not refused, refused
    tier.close()


@pytest.mark.parametrize(
    ("limit", "policy", "words"),
    [
        (0, "noeviction", "no maxmemory"),
        (1 << 30, "noeviction", "evicts nothing"),
        (1 << 30, "allkeys-lru", ""),
    ],
)
def test_it_warns_once_of_a_server_that_will_fill_up(
    redis_server: str,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    limit: int,
    policy: str,
    words: str,
) -> None:
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", limit)
    try:
        for _ in range(2):
            tier = RedisTier(redis_server, RedisOptions(key_prefix=PREFIX, timeout_s=5))
            caplog.clear()
            for number in range(2):
                store(tier, make_block(number))
                client.client_kill_filter(_type="normal", skipme=True)
            lines = [record.getMessage() for record in caplog.records]
            assert len(lines) == bool(words)
            assert all(words in line for line in lines)
            tier.close()
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
