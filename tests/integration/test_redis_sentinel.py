"""RedisTier behind three real Sentinels: it follows the primary, under load."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.errors import TierError
from kvtier.testing.block import make_chain, payload_of, read_of
from kvtier.testing.child import Child, await_true, free_port, work_directory
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, Health, HealthState, MissReason
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from tests.programs import redis_program

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SERVICE = "kv-cache"
PASSWORD = "p@ss/w:rd"
TIMEOUT_S = 0.3
DEADLINE_S = 0.6
SLACK_S = 3.0
FAILOVER_S = 20.0
"""The Sentinels' own part: about 3 s when the machine is idle."""


class SentinelTrio:
    """A primary, a replica, and three Sentinels that watch over them."""

    def __init__(self, directory: Path, sentinel_password: str = "") -> None:
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._sentinel_password = sentinel_password
        self.ports = [free_port() for _ in range(2)]
        self.sentinels = [free_port() for _ in range(3)]
        self.children: dict[int, Child] = {}

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://:{PASSWORD}@{hosts}/{SERVICE}/0"

    @contextlib.contextmanager
    def running(self) -> Iterator["SentinelTrio"]:
        with self._stack:
            primary, replica = self.ports
            self.start(primary)
            await_true(lambda: self.ask(primary, "PING"), "the primary answers")
            self.start(replica, "--replicaof", f"127.0.0.1 {primary}")
            await_true(lambda: self._is_connected(replica), "the replica follows")
            for port in self.sentinels:
                self._start_sentinel(port)
            await_true(lambda: all(map(self._knows_all, self.sentinels)), "they know all", 20)
            yield self

    def start(self, port: int, *options: str) -> None:
        command = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--requirepass", PASSWORD, "--masterauth", PASSWORD]
        command += ["--repl-diskless-sync-delay", "0", "--dir", str(self._directory), *options]
        child = Child(command, self._directory / f"{port}.log")
        self.children[port] = self._stack.enter_context(child)

    def ask(self, port: int, *words: str) -> object:
        password = self._sentinel_password if port in self.sentinels else PASSWORD
        once = Retry(NoBackoff(), 0)
        with (
            redis.Redis(
                port=port, password=password or None, socket_timeout=5, protocol=2, retry=once
            ) as client,
            contextlib.suppress(redis.RedisError),
        ):
            return client.execute_command(*words)
        return None

    def is_primary(self, port: int) -> bool:
        role = self.ask(port, "ROLE")
        return isinstance(role, list) and role[0] == b"master"

    def _is_connected(self, port: int) -> bool:
        role = self.ask(port, "ROLE")
        return isinstance(role, list) and role[0] == b"slave" and role[3] == b"connected"

    def _start_sentinel(self, port: int) -> None:
        file = self._directory / f"sentinel-{port}.conf"
        login = self._sentinel_password
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"dir {self._directory}",
            *([f"requirepass {login}", f"sentinel sentinel-pass {login}"] if login else []),
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.ports[0]} 2",
            f"sentinel auth-pass {SERVICE} {PASSWORD}",
            f"sentinel down-after-milliseconds {SERVICE} 1000",
            f"sentinel failover-timeout {SERVICE} 5000",
        ]
        file.write_text("\n".join(lines) + "\n")
        child = Child([redis_program(), str(file), "--sentinel"], self._directory / f"{port}.log")
        self._stack.enter_context(child)

    def _knows_all(self, port: int) -> bool:
        masters = self.ask(port, "SENTINEL", "MASTERS")
        if not isinstance(masters, list) or not masters:
            return False
        facts = dict(zip(masters[0][::2], masters[0][1::2], strict=True))
        return facts[b"num-slaves"] == b"1" and facts[b"num-other-sentinels"] == b"2"


@pytest.fixture(params=["", PASSWORD], ids=["open", "password"])
def trio(request: pytest.FixtureRequest) -> Iterator[SentinelTrio]:
    with work_directory() as directory, SentinelTrio(directory, request.param).running() as trio:
        yield trio


def test_a_primary_is_killed_under_load(trio: SentinelTrio) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    blocks = make_chain(range(30), 100_000)
    tier = RedisTier(trio.url, RedisOptions(timeout_s=TIMEOUT_S, value_bytes=64 << 10))
    is_over = threading.Event()
    try:
        store(tier, *blocks)
        primary, replica = trio.ports
        assert PASSWORD not in repr(tier) + str(tier.usage())
        with ThreadPoolExecutor(3) as threads:
            clients = [
                threads.submit(_use, tier, blocks, random.Random(seed + number), is_over)
                for number in range(3)
            ]
            trio.children[primary].kill()
            killed_s = time.monotonic()
            await_true(lambda: tier.health().state is HealthState.OUT, "health tells")
            await_true(lambda: trio.is_primary(replica), "the replica takes over", FAILOVER_S)
            replaced_s = time.monotonic()
            await_true(lambda: _serves(tier, blocks), "it is followed")
            print(
                f"replaced after {replaced_s - killed_s:.2f} s, "
                f"served {time.monotonic() - replaced_s:.2f} s later"
            )
            is_over.set()
            for client in clients:
                client.result(20)
        assert tier.health() == Health()
        assert tier.usage().generation == 1, "another server, perhaps without the last writes"
        trio.start(primary)  # it does not know yet that it is a replica now
        await_true(lambda: not trio.is_primary(primary), "it is made one", FAILOVER_S)
        assert _serves(tier, blocks)
    finally:
        is_over.set()
        tier.close()


def _serves(tier: RedisTier, blocks: list[BlockWrite]) -> bool:
    with contextlib.suppress(TierError):
        tier.write(blocks, soon())
        return fetch(tier, *blocks) == [None] * len(blocks)
    return False


def _use(
    tier: RedisTier, blocks: list[BlockWrite], dice: random.Random, is_over: threading.Event
) -> None:
    while not is_over.is_set():
        some = dice.sample(blocks, 6)
        reads = [read_of(block) for block in some]
        deadline_ns = time.monotonic_ns() + int(DEADLINE_S * 1e9)
        started_s = time.monotonic()
        with contextlib.suppress(TierError):
            if dice.random() < 0.3:
                tier.write(some, deadline_ns)
            else:
                for read, result in zip(reads, tier.read(reads, deadline_ns), strict=True):
                    if not isinstance(result, MissReason):
                        assert bytes(read.into) == payload_of(result)
        assert time.monotonic() - started_s < DEADLINE_S + SLACK_S


def test_no_sentinel_knows_the_service(trio: SentinelTrio) -> None:
    tier = RedisTier(trio.url.replace(SERVICE, "another"), RedisOptions(timeout_s=TIMEOUT_S))
    try:
        with pytest.raises(TierError, match="no Sentinel knows the primary") as raised:
            fetch(tier, *make_chain([1]))
        assert PASSWORD not in str(raised.value)
        assert tier.health().state is HealthState.OUT
        assert min(_refused_s(tier) for _ in range(5)) < TIMEOUT_S, "at once"
    finally:
        tier.close()


def _refused_s(tier: RedisTier) -> float:
    started_s = time.monotonic()
    with pytest.raises(TierError):
        fetch(tier, *make_chain([1]))
    return time.monotonic() - started_s
