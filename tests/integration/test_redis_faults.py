"""RedisTier against servers and networks that fail: a miss or a fault in time, never a wrong
block, never a hang, and in use again soon after."""

import contextlib
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import redis

from kvtier.errors import TierError, TierTimeout
from kvtier.testing.block import make_block, make_chain, payload_of, read_of
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, Health, HealthState, MissReason, WriteOutcome
from kvtier.tiers.redis.connection import ServerConnection
from kvtier.tiers.redis.tier import RedisOptions, RedisTier
from tests.integration.redis_child import RedisServer
from tests.integration.redis_proxy import Liar, Proxy

pytestmark = [pytest.mark.redis, pytest.mark.slow]

TIMEOUT_S = 0.3
SLACK_S = 3.0
"""What a call may take beyond its time on a machine that other tests keep busy."""

OPTIONS = RedisOptions(timeout_s=TIMEOUT_S, value_bytes=64 << 10)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with work_directory() as directory:
        yield RedisServer(directory)


@pytest.fixture
def child(server: RedisServer) -> Iterator[Child]:
    with server.start() as child:
        yield child


@contextlib.contextmanager
def opened(url: str, options: RedisOptions = OPTIONS) -> Iterator[RedisTier]:
    tier = RedisTier(url, options)
    try:
        yield tier
    finally:
        tier.close()


def within_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def fails(tier: RedisTier, block: BlockWrite, seconds: float = 5.0) -> TierError:
    """Return the fault of a read that has to end within the timeout, whatever its deadline."""
    started_s = time.monotonic()
    with pytest.raises(TierError) as raised:
        tier.read([read_of(block)], within_ns(seconds))
    took_s = time.monotonic() - started_s
    assert took_s < min(seconds, 2 * TIMEOUT_S) + SLACK_S, f"it took {took_s:.2f} s"
    return raised.value


def is_back(tier: RedisTier, block: BlockWrite) -> bool:
    """Tell whether the block is served again; also through probes, as the daemon makes them."""
    with contextlib.suppress(TierError):
        tier.health_check(within_ns(1))
        return fetch(tier, block) == [None] and tier.health() == Health()
    return False


def await_back(tier: RedisTier, block: BlockWrite) -> None:
    started_s = time.monotonic()
    await_true(lambda: is_back(tier, block), "it serves again", 2 + SLACK_S)
    print(f"back after {time.monotonic() - started_s:.2f} s")


def test_nothing_connects_before_the_first_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for form in ("redis", "rediss", "redis+cluster"):
            with opened(f"{form}://127.0.0.1:{port}") as tier:
                assert tier.health() == Health()
        with opened(f"redis+sentinel://127.0.0.1:{port}/service"):
            assert not select.select([listener], [], [], 0.05)[0]


def test_a_frozen_server(server: RedisServer, child: Child) -> None:
    block = make_block(1, 200_000)
    with opened(server.url) as tier:
        store(tier, block)
        with child.stopped():
            assert isinstance(fails(tier, block), TierTimeout)
            assert tier.health().state is HealthState.OUT
            assert "no answer in time" in tier.health().reason
            assert isinstance(fails(tier, block), TierTimeout), "nor can it be connected to"
            fails(tier, block, 0.05)
            with pytest.raises(TierTimeout):
                tier.write([make_block(2, 30 << 20)], within_ns(0.2))
        await_back(tier, block)


def test_a_call_without_time_says_nothing_of_the_server(server: RedisServer, child: Child) -> None:
    block = make_block(1)
    with opened(server.url) as tier:
        store(tier, block)
        with child.stopped():
            assert isinstance(fails(tier, block, 0.03), TierTimeout)
            assert tier.health() == Health()
        assert fetch(tier, block) == [None]


def test_a_connection_that_is_dropped_silently(server: RedisServer, child: Child) -> None:
    block = make_block(1)
    with Proxy(server.port) as proxy, opened(proxy.url) as tier:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: store(tier, block), range(16), timeout=20))
        proxy.silence()
        assert isinstance(fails(tier, block), TierTimeout)
        assert fetch(tier, block) == [None], "all the others that are dead are not tried"
        assert tier.usage().generation == 0, "the server has not changed"


def test_a_server_without_the_replicas_it_wants(server: RedisServer) -> None:
    kept, block = make_chain(range(2))
    with server.start() as child, opened(server.url) as tier, server.client() as client:
        assert child.is_running
        store(tier, kept)
        client.config_set("min-replicas-to-write", 1)
        assert tier.write([block, kept], soon()).outcomes == (WriteOutcome.REJECTED,) * 2
        assert tier.health().state is HealthState.DEGRADED
        assert "read-only: it has too few replicas" in tier.health().reason
        assert fetch(tier, kept, block) == [None, MissReason.ABSENT]
        client.config_set("min-replicas-to-write", 0)
        store_when_back(tier, block)
        assert tier.health() == Health()


def test_half_an_answer_and_then_silence(server: RedisServer, child: Child) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    blocks = make_chain(range(3), 150_000)
    with Proxy(server.port) as proxy, opened(proxy.url) as tier:
        store(tier, *blocks)
        for _ in range(12):
            reads = [read_of(block) for block in blocks]
            proxy.allow(dice.randrange(1, 450_000))
            started_s = time.monotonic()
            with pytest.raises(TierError):
                tier.read(reads, within_ns(0.15))
            assert time.monotonic() - started_s < 0.15 + SLACK_S
            proxy.allow(None)
            assert fetch(tier, *blocks) == [None] * 3


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x01\x02\xff\r\n" * 10,
        b"$-7\r\n",
        b"$999999999999\r\n",
        b"$12\r\nshort\r\n" + b"x" * 20,
        b"*99999999\r\n",
        b":12x\r\n",
        b"+" + b"x" * 100_000,
        b"-" + b"\xff" * 100 + b"\r\n",
        b"+OK\r\n",
        b"\r\n\r\n\r\n",
        b"",
    ],
    ids=lambda answer: repr(answer[:12]),
)
def test_garbage_instead_of_an_answer(answer: bytes, closes: bool) -> None:
    block = make_block(1, 100_000)
    with Liar(answer, closes=closes) as liar, opened(liar.url) as tier:
        for _ in range(2):
            with contextlib.suppress(TierError):
                assert fetch(tier, block) != [None]
            with contextlib.suppress(TierError):
                outcomes = tier.write([block], within_ns(1)).outcomes
                assert outcomes == (WriteOutcome.REJECTED,)
            with contextlib.suppress(TierError):
                tier.contains([block.header.block_hash], within_ns(1))
        assert liar.num_connections >= 1


@pytest.mark.parametrize(
    "form", ["redis+cluster://127.0.0.1:{}", "redis+sentinel://[::1]:1,127.0.0.1:{}/s"]
)
@pytest.mark.parametrize(
    "answer", [b"*1\r\n*3\r\n:1\r\n:x\r\n", b"*1\r\n:5\r\n", b"*0\r\n", b"-ERR no\r\n"]
)
def test_garbage_about_who_is_who(form: str, answer: bytes) -> None:
    block = make_block(1)
    with Liar(answer) as liar, opened(form.format(liar.port)) as tier:
        for _ in range(2):
            with pytest.raises(TierError):
                tier.read([read_of(block)], within_ns(2))
        assert tier.health().state is HealthState.OUT
        num_connections = liar.num_connections
        await_true(lambda: liar.num_connections > num_connections, "it is asked again")


def test_a_server_that_trickles(server: RedisServer) -> None:
    """Each byte comes within the timeout; the deadline holds all the same."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            link, _ = listener.accept()
            with link, contextlib.suppress(OSError):
                link.recv(1 << 16)
                link.sendall(b"$100000\r\n")
                while not is_over.wait(0.01):
                    link.sendall(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        with opened(f"redis://127.0.0.1:{listener.getsockname()[1]}") as tier:
            fails(tier, make_block(1, 100_000), 0.6)
        is_over.set()
        thread.join(5)


def test_a_restart_that_comes_back_empty(server: RedisServer, child: Child) -> None:
    block = make_block(1)
    with opened(server.url) as tier:
        store(tier, block)
        generation = tier.usage().generation
        child.kill()
        error = fails(tier, block)
        assert not isinstance(error, TierTimeout), "it is known at once"
        assert tier.health().state is HealthState.OUT
        fails(tier, block)
        with server.start():
            assert fetch(tier, block) == [MissReason.ABSENT]
            assert tier.usage().generation == generation + 1
            assert tier.health() == Health()
            store(tier, block)
            assert fetch(tier, block) == [None]
            with server.client() as client:
                client.flushall()
            assert fetch(tier, block) == [MissReason.ABSENT]


def test_a_server_that_is_still_loading(server: RedisServer) -> None:
    block = make_block(1)
    slowly = ("--key-load-delay", "3000", "--loading-process-events-interval-bytes", "1024")
    with opened(server.url) as tier:
        with server.start(), server.client() as client:
            store(tier, block)
            client.mset({f"other{number}": b"x" * 100 for number in range(20_000)})
            client.save()
        with server.start(*slowly), server.client() as client:
            error = fails(tier, block)
            assert "still loading its database" in str(error)
            assert tier.health().state is HealthState.OUT
            assert "loading" in tier.health().reason
            with pytest.raises(TierError, match="loading"):
                tier.health_check(soon())
            client.config_set("key-load-delay", 0)
            await_back(tier, block)


def test_a_server_busy_with_a_script(server: RedisServer) -> None:
    block = make_block(1)
    with (
        server.start("--lua-time-limit", "50"),
        server.client() as client,
        opened(server.url) as tier,
    ):
        store(tier, block)
        script = threading.Thread(target=_run_forever, args=(server,))
        script.start()
        await_true(lambda: _is_busy(client), "the script runs")
        assert "busy with a script" in str(fails(tier, block))
        client.script_kill()
        script.join(30)
        await_back(tier, block)


def _run_forever(server: RedisServer) -> None:
    with (
        redis.Redis(port=server.port, socket_timeout=20) as client,
        contextlib.suppress(redis.ResponseError),
    ):
        client.eval("while true do end", 0)


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


def test_a_server_with_too_many_clients(server: RedisServer, child: Child) -> None:
    block = make_block(1)
    with server.client() as client, opened(server.url) as tier:
        store(tier, block)
        for link in client.client_list():
            if link["id"] != str(client.client_id()):
                client.client_kill_filter(_id=link["id"])
        client.config_set("maxclients", 1)
        assert not isinstance(fails(tier, block), TierTimeout)
        assert tier.health().state is HealthState.OUT
        client.config_set("maxclients", 100)
        await_back(tier, block)


@pytest.mark.parametrize(
    ("withdrawn", "reason"),
    [
        ({"passwords": ["-right", "+wrong"], "reset_keys": False}, "rejects the user or the pass"),
        ({"commands": ["-get"]}, "lacks permissions"),
        ({"enabled": False}, "rejects the user or the pass"),
    ],
    ids=["password", "command", "off"],
)
def test_a_login_that_is_withdrawn(
    server: RedisServer, child: Child, withdrawn: dict[str, object], reason: str
) -> None:
    block = make_block(1)
    granted = {"enabled": True, "passwords": ["+right"], "keys": ["*"], "commands": ["+@all"]}
    with server.client() as client:
        client.acl_setuser("kv", **granted)
        with opened(f"redis://kv:right@127.0.0.1:{server.port}") as tier:
            store(tier, block)
            client.acl_setuser("kv", **({"enabled": True} | withdrawn))
            for link in client.client_list():
                if link["user"] == "kv":
                    client.client_kill_filter(_id=link["id"])
            assert reason in str(fails(tier, block))
            assert tier.health().state is HealthState.OUT
            assert reason in tier.health().reason
            assert "right" not in tier.health().reason
            client.acl_setuser("kv", **granted)
            await_back(tier, block)


def test_no_password_where_one_is_wanted(server: RedisServer) -> None:
    with server.start("--requirepass", "secret"), opened(server.url) as tier:
        assert "it asks for a password (-NOAUTH)" in str(fails(tier, make_block(1)))
        assert tier.health().state is HealthState.OUT


def test_a_name_that_is_never_resolved(
    server: RedisServer, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resolver of the system is what hangs here: nothing of ours can interrupt it."""
    resolve, goes_on = socket.getaddrinfo, threading.Event()

    def hang(host: str, *rest: object, **named: object) -> object:
        if host == "hanging.example":
            assert goes_on.wait(30)
            host = "127.0.0.1"
        return resolve(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    before = threading.active_count()
    block = make_block(1)
    with opened(f"redis://hanging.example:{server.port}") as tier:
        for _ in range(6):
            fails(tier, block)
        assert threading.active_count() - before <= OPTIONS.num_workers
        assert "connection attempts hang" in str(fails(tier, block))
        assert min(_refused_s(tier, block) for _ in range(5)) < TIMEOUT_S, "at once"
        goes_on.set()
        store_when_back(tier, block)


def _refused_s(tier: RedisTier, block: BlockWrite) -> float:
    started_s = time.monotonic()
    fails(tier, block)
    return time.monotonic() - started_s


def store_when_back(tier: RedisTier, block: BlockWrite) -> None:
    def is_stored() -> bool:
        with contextlib.suppress(TierError):
            return tier.write([block], soon()).outcomes == (WriteOutcome.STORED,)
        return False

    await_true(is_stored, "it takes blocks")
    assert fetch(tier, block) == [None]


def test_closing_ends_calls_that_are_under_way(server: RedisServer, child: Child) -> None:
    block = make_block(1)
    patient = RedisOptions(timeout_s=20)
    with opened(server.url, patient) as tier, ThreadPoolExecutor(1) as threads:
        store(tier, block)
        with child.stopped():
            waiting = threads.submit(tier.read, [read_of(block)], soon())
            await_true(lambda: _num_unread(server) > 0, "the call waits for its answer")
            tier.close()
            assert isinstance(waiting.exception(10), TierError), "before the server goes on"
        with pytest.raises(TierError, match="closed"):
            fetch(tier, block)


def test_a_call_that_begins_as_it_closes_fails(
    server: RedisServer, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = make_block(1)
    with opened(server.url) as tier:
        store(tier, block)

        def close_meanwhile(_link: ServerConnection) -> bool:
            tier.close()
            return True

        monkeypatch.setattr(ServerConnection, "is_alive", property(close_meanwhile))
        with pytest.raises(TierError, match="closed"):
            fetch(tier, block)


def _num_unread(server: RedisServer) -> int:
    """Return how many connections to the server have bytes that it has not read."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    port = f":{server.port:04X}"
    rows = [line.split() for line in lines]
    return sum(row[1].endswith(port) and not row[4].endswith(":00000000") for row in rows)


def test_memory_stays_flat(server: RedisServer, child: Child) -> None:
    blocks = make_chain(range(4), 3 << 20)
    reads = [read_of(block) for block in blocks]
    with opened(server.url, RedisOptions(timeout_s=5)) as tier:
        store(tier, *blocks)

        def work(rounds: int) -> None:
            for _ in range(rounds):
                assert tier.read(reads, soon()) == [block.header for block in blocks]
                tier.remove([blocks[0].header.block_hash], soon())
                store(tier, *blocks)

        work(5)
        before_bytes = psutil.Process().memory_info().rss
        work(25)
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        print(f"grown by {grown_bytes / 1e6:.1f} MB after 300 MB of loads")
        assert grown_bytes < 16 << 20


def test_weather(server: RedisServer) -> None:
    """Whatever happens to the server, in any order: no wrong block, and no call past its time."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    blocks = make_chain(range(30), 90_000)
    is_over = threading.Event()
    with opened(server.url) as tier, contextlib.ExitStack() as stack:
        child = stack.enter_context(server.start())
        with ThreadPoolExecutor(3) as threads:
            clients = [
                threads.submit(_use, tier, blocks, random.Random(seed + number), is_over)
                for number in range(3)
            ]
            for _ in range(12):
                child = _trouble(dice, server, child, stack)
                is_over.wait(dice.uniform(0.02, 0.3))
            is_over.set()
            served = [client.result(20) for client in clients]
        print(f"served {served} blocks in the storm")
        store_when_back(tier, blocks[0])


def _trouble(
    dice: random.Random, server: RedisServer, child: Child, stack: contextlib.ExitStack
) -> Child:
    with server.client() as client, contextlib.suppress(redis.RedisError):
        steps: list[Callable[[], object]] = [
            client.flushall,
            lambda: client.client_pause(200),
            lambda: client.client_kill_filter(_type="normal", skipme=True),
            lambda: client.config_set("maxmemory", dice.choice(["1mb", "0"])),
        ]
        if dice.random() < 0.75:
            dice.choice(steps)()
            return child
    if dice.random() < 0.5:
        with child.stopped():
            threading.Event().wait(0.4)
        return child
    child.kill()
    return stack.enter_context(server.start())


def _use(
    tier: RedisTier, blocks: list[BlockWrite], dice: random.Random, is_over: threading.Event
) -> int:
    num_served = 0
    while not is_over.is_set():
        some = dice.sample(blocks, dice.randint(1, 6))
        seconds = dice.choice([0.05, 0.5])
        started_s = time.monotonic()
        with contextlib.suppress(TierError):
            if dice.random() < 0.4:
                tier.write(some, within_ns(seconds))
            else:
                reads = [read_of(block) for block in some]
                for read, result in zip(reads, tier.read(reads, within_ns(seconds)), strict=True):
                    if not isinstance(result, MissReason):
                        assert bytes(read.into) == payload_of(result)
                        num_served += 1
        assert time.monotonic() - started_s < seconds + SLACK_S
    return num_served
