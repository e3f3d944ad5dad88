"""What lies in the server: split, sealed, of an age; and what others may do to it, which is never
served."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from kvtier.core.identity import EVERYTHING, HEADER_BYTES, Selection, tenant_digest
from kvtier.daemon.tiers.benchmark import run_benchmark
from kvtier.errors import StartError, TierError, TierFull
from kvtier.testing.block import make_block, make_chain
from kvtier.testing.child import free_port
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, HealthState, MissReason, WriteOutcome
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from kvtier.tiers.redis.value import HEAD_BYTES
from kvtier.tiers.seal import KeyRing, Seal, SealMode
from tests.programs import requires

pytestmark = pytest.mark.redis

PREFIX = "values:"
SPLIT_BYTES = 64 << 10
OPTIONS = RedisOptions(key_prefix=PREFIX, timeout_s=5, ttl_s=100, value_bytes=SPLIT_BYTES)
KEYS = {name: f"{name} {number:064x}" for number, name in enumerate(("old", "new"), 1)}

Open = Callable[[RedisOptions], RedisTier]


@pytest.fixture
def client(redis_server: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server, socket_timeout=60) as client:
        client.flushall()
        yield client


@pytest.fixture
def opened(redis_server: str, client: redis.Redis) -> Iterator[Open]:
    with contextlib.ExitStack() as stack:

        def opened(options: RedisOptions) -> RedisTier:
            tier = RedisTier(redis_server, options)
            stack.callback(tier.close)
            return tier

        yield opened


@pytest.fixture
def sealed(tmp_path: Path) -> Callable[..., RedisOptions]:
    """Return options of a mode with keys of these names, the first one sealing."""

    def options(mode: SealMode, *names: str, **changes: object) -> RedisOptions:
        file = tmp_path / f"{'-'.join(names)}.keys"
        file.write_text("".join(f"{KEYS[name]}\n" for name in names))
        file.chmod(0o600)
        seal = Seal(mode, KeyRing.load(file), "remote")
        return replace(OPTIONS, seal=seal, **changes)

    return options


def keys_of(block: BlockWrite) -> list[str]:
    head = f"{PREFIX}{{{block.header.block_hash.hex()}}}"
    num_parts = -(-block.header.payload_bytes // SPLIT_BYTES)
    return [head, *(f"{head}:{part}" for part in range(1, num_parts))]


def test_a_large_block_is_split_and_each_value_expires(opened: Open, client: redis.Redis) -> None:
    tier, block = opened(OPTIONS), make_block(1, 200_000)
    store(tier, block)
    keys = keys_of(block)
    assert len(keys) == 4
    assert sorted(client.keys()) == sorted(key.encode() for key in keys)
    lengths = [client.strlen(key) for key in keys]
    assert lengths == [
        HEAD_BYTES + SPLIT_BYTES,
        SPLIT_BYTES,
        SPLIT_BYTES,
        200_000 - 3 * SPLIT_BYTES,
    ]
    assert len({key_slot(key.encode()) for key in keys}) == 1
    for key in keys:
        assert 90_000 < client.pttl(key) <= 100_000
        client.pexpire(key, 5_000)
    store(tier, block)
    assert all(client.pttl(key) > 90_000 for key in keys), "storing again renews all of it"
    assert fetch(tier, block) == [None]
    assert tier.remove([block.header.block_hash], soon()).num_bytes == 200_000
    assert client.dbsize() == 0


def test_a_block_is_there_for_others_only_once_all_of_it_is(
    opened: Open, client: redis.Redis
) -> None:
    tier, block = opened(OPTIONS), make_block(1, 200_000)
    client.config_set("slowlog-log-slower-than", 0)  # so that the server tells what it did
    try:
        client.slowlog_reset()
        store(tier, block)
        told = [entry["command"].split()[:2] for entry in client.slowlog_get(128)]
    finally:
        client.config_set("slowlog-log-slower-than", 10_000)
    written = [words[1].decode() for words in reversed(told) if words[0] == b"SET"]
    assert sorted(written) == sorted(keys_of(block))
    assert written[-1] == keys_of(block)[0], "its head comes last"


@pytest.mark.parametrize("extra_bytes", [-1, 0, 1])
@pytest.mark.parametrize("num_values", [1, 2, 5])
def test_every_way_to_cut(opened: Open, num_values: int, extra_bytes: int) -> None:
    tier = opened(OPTIONS)
    blocks = make_chain(range(3), num_values * SPLIT_BYTES + extra_bytes)
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3


def test_nodes_that_split_otherwise_share(opened: Open) -> None:
    sizes = [1024, SPLIT_BYTES, 1 << 20]
    tiers = [opened(replace(OPTIONS, value_bytes=size)) for size in sizes]
    for number, (writer, reader) in enumerate(permutations(tiers, 2)):
        blocks = make_chain([number, 1, 2], 300_000)
        store(writer, *blocks)
        assert fetch(reader, *blocks) == [None] * 3
        store(reader, *blocks)
        assert fetch(writer, *blocks) == [None] * 3


def test_a_part_that_is_gone_is_a_miss_and_the_rest_goes(opened: Open, client: redis.Redis) -> None:
    tier, (block, other) = opened(OPTIONS), make_chain(range(2), 200_000)
    for key in keys_of(block)[1:]:
        store(tier, block, other)
        client.unlink(key)
        assert fetch(tier, block, other) == [MissReason.ABSENT, None]
        assert client.exists(*keys_of(block)) == 0
    store(tier, block)
    client.unlink(keys_of(block)[2])
    store(tier, block)
    assert fetch(tier, block) == [None], "storing it again mends it, too"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
def test_measuring_a_full_server_evicts_no_key(
    opened: Open, client: redis.Redis, policy: str
) -> None:
    tier, blocks = opened(OPTIONS), [make_block(number, 100_000) for number in range(8)]
    store(tier, *blocks)
    client.set("other", bytes(1 << 20))
    num_keys = client.dbsize()
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (2 << 20))
    try:
        with pytest.raises(TierFull, match="less than 16384 KiB of memory free"):
            run_benchmark(1 << 20, tier, soon())
        run_benchmark(64 << 10, tier, soon())
        assert tier.health().state is HealthState.UP
        assert client.dbsize() == num_keys
    finally:
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")


def test_keys_of_a_measurement_expire_soon(opened: Open, client: redis.Redis) -> None:
    tier, block = opened(OPTIONS), make_block(1, 100_000)
    with tier.scratch(100_000, 1, soon()) as scratch:
        store(scratch, block)
        assert all(0 < client.pttl(key) <= 60_000 for key in keys_of(block))
    store(tier, block)
    assert all(client.pttl(key) > 60_000 for key in keys_of(block))


def test_a_server_that_does_not_tell_its_memory_is_not_measured(
    client: redis.Redis, redis_server: str
) -> None:
    client.execute_command("ACL SETUSER", "mute", "on", ">secret", "~*", "+@all", "-info")
    tier = RedisTier(f"redis://mute:secret@{redis_server.rpartition('@')[2]}", OPTIONS)
    try:
        with pytest.raises(TierFull, match="does not report how much memory is free"):
            run_benchmark(64 << 10, tier, soon())
        assert tier.health().state is HealthState.UP
    finally:
        tier.close()
        client.acl_deluser("mute")


def test_no_room_for_all_parts_leaves_none(opened: Open, client: redis.Redis) -> None:
    tier, small, large = opened(OPTIONS), make_block(1), make_block(2, 8 << 20)
    store(tier, small)
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (2 << 20))
    try:
        assert tier.write([large], soon()).outcomes == (WriteOutcome.REJECTED,)
        assert tier.health().state is HealthState.DEGRADED
        assert client.keys() == [keys_of(small)[0].encode()]
    finally:
        client.config_set("maxmemory", 0)
    store(tier, large)
    assert fetch(tier, small, large) == [None, None]


def test_a_purge_reaches_every_part_and_no_one_else(opened: Open, client: redis.Redis) -> None:
    tier = opened(OPTIONS)
    spaces = [b"space one.......", b"space two......."]
    tenants = [tenant_digest(name) for name in ("one", "two")]
    chains = {
        (space, tenant): make_chain(range(4), 150_000, key_space=space, tenant=tenant)
        for space in spaces
        for tenant in tenants
    }
    for chain in chains.values():
        store(tier, *chain)
    orphan = f"{PREFIX}{{{'a' * 32}}}:3"
    others = ["other", PREFIX + "note", PREFIX + "{not hex}"]
    client.mset(dict.fromkeys([orphan, *others], b"x"))

    def left() -> int:
        return client.dbsize() - client.exists(*others)

    removed = tier.purge(Selection(spaces[0], tenants[0]), soon())
    assert (removed.num_blocks, removed.num_bytes) == (4, 600_000)
    assert left() == 3 * 4 * 3, "its parts are gone, and so is the part of nobody"
    assert tier.purge(Selection(tenant=tenants[1]), soon()).num_blocks == 8
    assert fetch(tier, *chains[spaces[1], tenants[0]]) == [None] * 4
    assert left() == 4 * 3
    assert tier.purge(EVERYTHING, soon()).num_blocks == 4
    assert left() == 0
    assert client.exists(*others) == 3


def _swap(client: redis.Redis, one: list[str], other: list[str]) -> None:
    for key, value in zip(one, client.mget(other), strict=True):
        client.set(key, value)


def _flip(client: redis.Redis, key: str, position: int) -> None:
    (byte,) = client.getrange(key, position, position)
    client.setrange(key, position, bytes([byte ^ 0x10]))


Tamper = Callable[[redis.Redis, list[str], list[str], list[str]], object]
TAMPERED: dict[str, Tamper] = {
    "flips a byte of the payload": lambda c, own, *_: _flip(c, own[0], HEAD_BYTES + 7),
    "flips a byte of a part": lambda c, own, *_: _flip(c, own[2], 99),
    "flips the tag": lambda c, own, *_: _flip(c, own[0], 92),
    "flips the position": lambda c, own, *_: _flip(c, own[0], 12),
    "flips the tenant": lambda c, own, *_: _flip(c, own[0], 40),
    "changes the codec": lambda c, own, *_: _flip(c, own[0], HEADER_BYTES),
    "changes the key": lambda c, own, *_: _flip(c, own[0], HEADER_BYTES + 5),
    "changes when it was written": lambda c, own, *_: _flip(c, own[0], HEADER_BYTES + 9),
    "changes the nonce": lambda c, own, *_: _flip(c, own[0], HEADER_BYTES + 20),
    "cuts a part": lambda c, own, *_: c.set(own[1], c.get(own[1])[:-1]),
    "cuts the head": lambda c, own, *_: c.set(own[0], c.get(own[0])[:-1]),
    "empties the head": lambda c, own, *_: c.set(own[0], b""),
    "appends": lambda c, own, *_: c.append(own[3], b"x"),
    "puts another block there": lambda c, own, other, _: _swap(c, own, other),
    "puts another's part there": lambda c, own, other, _: _swap(c, own[1:2], other[1:2]),
    "puts another tenant's there": lambda c, own, _, foreign: _swap(c, own, foreign),
    "puts other bytes there": lambda c, own, *_: c.set(own[1], b"x" * SPLIT_BYTES),
    "puts a list there": lambda c, own, *_: (c.delete(own[0]), c.lpush(own[0], "x")),
    "exchanges two parts": lambda c, own, *_: _swap(c, own[1:3], own[2:0:-1]),
}


@pytest.mark.parametrize("mode", list(SealMode))
@pytest.mark.parametrize("what", TAMPERED)
def test_what_someone_else_changed_is_never_served(
    opened: Open,
    client: redis.Redis,
    sealed: Callable[..., RedisOptions],
    mode: SealMode,
    what: str,
) -> None:
    tier = opened(sealed(mode, "new"))
    block, other = make_chain(range(2), 200_000)
    foreign = make_block(1, 200_000, tenant=tenant_digest("another"))
    store(tier, block, other, foreign)
    TAMPERED[what](client, *map(keys_of, (block, other, foreign)))
    (reason, *rest) = fetch(tier, block, other, foreign)
    assert reason is not None
    assert rest == [None, None]
    store(tier, block)
    assert fetch(tier, block) == [None], "it may be stored again at once"


@pytest.mark.parametrize("mode", [SealMode.SIGN, SealMode.ENCRYPT])
def test_a_forger_without_the_key_is_not_served(
    opened: Open, client: redis.Redis, sealed: Callable[..., RedisOptions], mode: SealMode
) -> None:
    """A whole block with a right checksum, written by someone who has no key, or another."""
    block = make_block(1, 200_000)
    ours = opened(sealed(mode, "new"))
    for forger in (opened(OPTIONS), opened(sealed(mode, "old"))):
        client.flushall()
        store(forger, block)
        assert fetch(ours, block) == [MissReason.SEAL]
        assert client.exists(keys_of(block)[0]), "there may be those whom it serves"
        store(ours, block)
        assert fetch(ours, block) == [None]


def test_no_payload_lies_open_where_it_is_encrypted(
    opened: Open, client: redis.Redis, sealed: Callable[..., RedisOptions]
) -> None:
    block = make_block(1, 200_000)
    sample = bytes(block.payload[100_000:100_032])
    store(opened(sealed(SealMode.SIGN, "new")), block)
    assert any(sample in client.get(key) for key in keys_of(block))
    client.flushall()
    store(opened(sealed(SealMode.ENCRYPT, "new")), block)
    assert not any(sample in client.get(key) for key in keys_of(block))
    assert sample in bytes(block.payload), "what was to be stored is as it was"


def test_keys_are_rotated(opened: Open, sealed: Callable[..., RedisOptions]) -> None:
    before, during, after = (
        opened(sealed(SealMode.ENCRYPT, *names)) for names in (["old"], ["new", "old"], ["new"])
    )
    one, two = make_chain(range(2), 100_000)
    store(before, one)
    assert fetch(during, one) == [None]
    store(during, two)
    assert fetch(after, two) == [None]
    assert fetch(after, one) == [MissReason.SEAL]
    assert fetch(before, two) == [MissReason.SEAL]
    assert fetch(during, one, two) == [None, None], "nobody has taken it away"


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("mode", list(SealMode))
def test_an_old_block_is_not_served_however_often_it_was_renewed(
    opened: Open, client: redis.Redis, sealed: Callable[..., RedisOptions], mode: SealMode
) -> None:
    clock = Clock()
    tier = opened(sealed(mode, "new", max_age_s=60, now_s=clock))
    block = make_block(1, 200_000)
    store(tier, block)
    replayed = dict(zip(keys_of(block), client.mget(keys_of(block)), strict=True))
    for _ in range(3):
        clock.now_s += 19
        store(tier, block)
        assert fetch(tier, block) == [None]
    clock.now_s += 4
    assert fetch(tier, block) == [MissReason.EXPIRED]
    assert client.dbsize() == 0
    store(tier, block)
    assert fetch(tier, block) == [None]
    client.mset(replayed)
    assert fetch(tier, block) == [MissReason.EXPIRED], "one that someone has kept and put back"
    client.mset(replayed)
    store(tier, block)
    assert fetch(tier, block) == [None]
    clock.now_s -= 3600
    assert fetch(tier, block) == [MissReason.EXPIRED], "nor one from the future"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an authority, and a server's certificate that descends from it."""
    folder = tmp_path_factory.mktemp("tls")
    requires("redis-server")  # Valkey from PyPI is built without TLS
    new = [
        requires("openssl"),
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
    ]
    new += ["-nodes", "-days", "2"]
    for name in ("ca", "other"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        subprocess.run([*new, *files], cwd=folder, check=True, capture_output=True)
    sign = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "server.key", "-out", "server.pem", "-subj", "/CN=server"]
    subprocess.run([*new, *files, *sign], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def tls_url(redis_server: str, client: redis.Redis, certificates: Path) -> Iterator[str]:
    port = free_port()
    for name, file in (("cert", "server.pem"), ("key", "server.key"), ("ca-cert", "ca.pem")):
        client.config_set(f"tls-{name}-file", str(certificates / file))
    client.config_set("tls-auth-clients", "no")
    client.config_set("tls-port", port)
    password = redis_server.split("@", maxsplit=1)[0].rpartition(":")[2]
    yield f"rediss://:{password}@127.0.0.1:{port}"
    client.config_set("tls-port", 0)


def test_over_tls(tls_url: str, certificates: Path, client: redis.Redis) -> None:
    options = replace(OPTIONS, tls_ca=certificates / "ca.pem", value_bytes=1 << 20)
    tier = RedisTier(tls_url, options)
    before = client.info("stats")["total_connections_received"]
    blocks = make_chain(range(6), 3_000_000)
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 6
    assert fetch(tier, *blocks) == [None] * 6
    after = client.info("stats")["total_connections_received"]
    assert after == before + 1, "an idle connection is used again"
    tier.close()


def test_a_server_of_another_authority_is_refused(tls_url: str, certificates: Path) -> None:
    for tls_ca in (certificates / "other.pem", None):
        tier = RedisTier(tls_url, replace(OPTIONS, tls_ca=tls_ca))
        with pytest.raises(TierError, match="certificate"):
            fetch(tier, make_block(1))
        assert tier.health().state is HealthState.OUT
        tier.close()


def test_tls_to_a_server_that_speaks_none(redis_server: str, tls_url: str) -> None:
    for url in (redis_server.replace("redis:", "rediss:"), tls_url.replace("rediss:", "redis:")):
        tier = RedisTier(url, replace(OPTIONS, timeout_s=0.5))
        with pytest.raises(TierError):
            fetch(tier, make_block(1))
        tier.close()


def test_certificates_that_are_not_there_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError) as raised:
        RedisTier("rediss://h", replace(OPTIONS, tls_ca=tmp_path / "none.pem"))
    assert raised.value.field == "remote.tls_ca"
    (tmp_path / "empty.pem").write_text("no certificate")
    with pytest.raises(StartError, match="contains no certificate") as raised:
        RedisTier("rediss://h", replace(OPTIONS, tls_ca=tmp_path / "empty.pem"))
    assert raised.value.field == "remote.tls_ca"
