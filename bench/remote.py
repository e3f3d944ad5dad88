"""Compare RedisTier with a raw hiredis client on the same server.

    python bench/remote.py [--block-bytes N] [--batch N] [--json]

The raw client is a socket and hiredis: a pipeline of SET or GET per batch, without copies when
writing, and into Python objects when reading. The tier splits blocks into values of 1 MiB, renews
their time to live, verifies them, and reads into the caller's memory. They run in turns; prints
medians, the ratio of the tier to the client, and the time of another client's PING meanwhile. Needs
redis-server or valkey-server.
"""

import argparse
import json
import multiprocessing
import secrets
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import hiredis
import psutil
import redis

from kvtier.core.identity import BlockHeader
from kvtier.testing.block import aligned_memory, make_chain, read_of
from kvtier.testing.child import Child, free_port, work_directory
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.redis.tier import RedisOptions, RedisTier

_PING_PAUSE_S = 0.002


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Run a Redis or Valkey server and yield its URL."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        sys.exit("this benchmark needs redis-server (apt-get install redis-server)")
    port, password = free_port(), secrets.token_hex(8)
    file = directory / "redis.conf"
    file.write_text(f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\n')
    with Child([program, str(file)], directory / "redis.log") as server:
        server.await_log("Ready to accept connections")
        yield f"redis://:{password}@127.0.0.1:{port}/0"
        server.stop()


class RawClient:
    """A socket and hiredis without a client library."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)
        self._reader = hiredis.Reader()
        assert self.ask(("AUTH", parts.password)) == [b"OK"]

    def ask(self, *commands: tuple[object, ...]) -> list[object]:
        self._socket.sendall(b"".join(map(hiredis.pack_command, commands)))
        return self._replies(len(commands))

    def _replies(self, count: int) -> list[object]:
        replies: list[object] = []
        while len(replies) < count:
            while (reply := self._reader.gets()) is not False:
                replies.append(reply)
            if len(replies) < count:
                self._reader.feed(self._buffer, 0, self._socket.recv_into(self._buffer))
        return replies

    def write(self, batches: list[list[BlockWrite]]) -> None:
        for batch in batches:
            for block in batch:
                key = raw_key(block)
                head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
                self._socket.sendall(head % (len(key), key, len(block.payload)))
                self._socket.sendall(block.payload)
                self._socket.sendall(b"\r\n$2\r\nPX\r\n$9\r\n100000000\r\n")
            assert set(self._replies(len(batch))) == {b"OK"}

    def read(self, batches: list[list[BlockWrite]]) -> None:
        for batch in batches:
            assert all(self.ask(*(("GET", raw_key(block)) for block in batch)))


def raw_key(block: BlockWrite) -> bytes:
    return b"raw:" + block.header.block_hash


def write_tier(tier: RedisTier, batches: list[list[BlockWrite]]) -> None:
    for batch in batches:
        assert set(tier.write(batch, soon()).outcomes) == {WriteOutcome.STORED}


def read_tier(tier: RedisTier, batches: list[list[BlockWrite]], into: memoryview) -> None:
    for batch in batches:
        size = len(into) // len(batch)
        reads = [read_of(block, into[i * size :][:size]) for i, block in enumerate(batch)]
        results = tier.read(reads, soon())
        assert all(isinstance(result, BlockHeader) for result in results)


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


class Bystander:
    """Another client of the server, in its own process, that only sends PING."""

    def __init__(self, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._child = context.Process(target=_ping, args=(url, theirs))
        self._child.start()
        self._ours.recv()
        self.seconds: list[float] = []

    def __enter__(self) -> "Bystander":
        self._ours.send("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send("end")
        self.seconds = sorted(self._ours.recv())
        self._child.join(20)

    def milliseconds(self, quantile: float) -> float:
        return 1000 * self.seconds[int(quantile * (len(self.seconds) - 1))]


def _ping(url: str, link: Connection) -> None:
    with redis.Redis.from_url(url) as client:
        client.ping()
        link.send("ready")
        link.recv()
        seconds: list[float] = []
        while True:  # at least once, even in a short step
            seconds.append(timed(client.ping))
            if link.poll(_PING_PAUSE_S):
                break
        link.send(seconds)


def compare(options: argparse.Namespace) -> dict[str, float]:
    blocks = make_chain(range(options.blocks), options.block_bytes)
    starts = range(0, len(blocks), options.batch)
    batches = [blocks[start : start + options.batch] for start in starts]
    into = aligned_memory(options.batch * options.block_bytes)
    seconds: dict[str, list[float]] = {}
    with (
        work_directory() as directory,
        redis_server(directory) as url,
        redis.Redis.from_url(url) as client,
    ):
        tier = RedisTier(url, RedisOptions(timeout_s=10))
        raw = RawClient(url)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("write_client", partial(raw.write, batches)),
            ("write_tier", partial(write_tier, tier, batches)),
            ("read_client", partial(raw.read, batches)),
            ("read_tier", partial(read_tier, tier, batches, into)),
        ]
        for run in range(options.runs):
            client.flushall()
            for name, step in (steps[i] for i in ([0, 1, 2, 3], [1, 0, 3, 2])[run % 2]):
                seconds.setdefault(name, []).append(timed(step))
        hashes = [block.header.block_hash for block in blocks]
        contains_s = statistics.median(
            timed(lambda: tier.contains(hashes, soon())) for _ in range(options.runs)
        )
        figures = {
            "contains_ms": 1000 * contains_s,
            "ping_ms": 1000 * statistics.median(timed(client.ping) for _ in range(100)),
        }
        memory_bytes = psutil.Process().memory_info().rss
        for name, step in steps:
            if name == "write_tier":
                tier.remove(hashes, soon())
            with Bystander(url) as bystander:
                for _ in range(3):
                    step()
            figures[f"ping_during_{name}_p50_ms"] = bystander.milliseconds(0.5)
            figures[f"ping_during_{name}_p99_ms"] = bystander.milliseconds(0.99)
        figures["memory_grown_mb"] = (psutil.Process().memory_info().rss - memory_bytes) / 1e6
        tier.close()
    total_bytes = options.blocks * options.block_bytes
    speed = {name: total_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    figures |= {f"{name}_gb_per_s": value for name, value in speed.items()}
    figures["write_ratio"] = speed["write_tier"] / speed["write_client"]
    figures["read_ratio"] = speed["read_tier"] / speed["read_client"]
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = compare(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:>12,}")


if __name__ == "__main__":
    main()
