"""RemoteTier against a raw Redis client: the same bytes to the same server of our own.

    python bench/remote.py [--json]

The raw client sends one pipeline of SET, and one MGET, a batch. Both take turns; prints medians
and the ratio of the tier to the client. The tier also renews, checks and copies.
"""

import argparse
import json
import secrets
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import redis

from kvtier.core.identity import BlockHeader
from kvtier.testing.block import make_chain, read_of
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.remote import RemoteTier


@contextmanager
def server() -> Iterator[str]:
    """Run a redis-server; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    password = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "redis.conf"
        file.write_text(f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\n')
        child = subprocess.Popen(["redis-server", file], stdout=subprocess.DEVNULL)
        try:
            url = f"redis://:{password}@127.0.0.1:{port}"
            deadline = time.monotonic() + 20
            with redis.Redis.from_url(url) as client:
                while True:
                    with suppress(redis.ConnectionError):
                        client.ping()
                        break
                    assert time.monotonic() < deadline, "the redis-server does not answer"
                    time.sleep(0.02)
            yield url
        finally:
            child.terminate()
            child.wait(20)


def write_raw(client: redis.Redis, batches: list[list[BlockWrite]]) -> None:
    for batch in batches:
        with client.pipeline(transaction=False) as pipeline:
            for block in batch:
                pipeline.set(b"raw:" + block.header.block_hash, bytes(block.payload), px=10**8)
            assert all(pipeline.execute())


def read_raw(client: redis.Redis, batches: list[list[BlockWrite]]) -> None:
    for batch in batches:
        values = client.mget([b"raw:" + block.header.block_hash for block in batch])
        assert all(values)


def write_tier(tier: RemoteTier, batches: list[list[BlockWrite]]) -> None:
    for batch in batches:
        assert set(tier.write(batch, soon()).outcomes) == {WriteOutcome.STORED}


def read_tier(tier: RemoteTier, batches: list[list[BlockWrite]], into: memoryview) -> None:
    for batch in batches:
        results = tier.read([read_of(block, into) for block in batch], soon())
        assert all(isinstance(result, BlockHeader) for result in results)


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def compare(options: argparse.Namespace) -> dict[str, float]:
    blocks = make_chain(range(options.blocks), options.block_bytes)
    starts = range(0, len(blocks), options.batch)
    batches = [blocks[start : start + options.batch] for start in starts]
    into = memoryview(bytearray(options.block_bytes))
    seconds: dict[str, list[float]] = {}
    with server() as url, redis.Redis.from_url(url) as client:
        tier = RemoteTier(url, timeout_s=10)
        steps: list[tuple[str, Callable[[], None]]] = [
            ("write_client", partial(write_raw, client, batches)),
            ("write_tier", partial(write_tier, tier, batches)),
            ("read_client", partial(read_raw, client, batches)),
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
        ping_s = statistics.median(timed(client.ping) for _ in range(options.runs))
        tier.close()
    total_bytes = options.blocks * options.block_bytes
    speed = {name: total_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    return {f"{name}_gb_per_s": round(value, 3) for name, value in speed.items()} | {
        "write_ratio": round(speed["write_tier"] / speed["write_client"], 3),
        "read_ratio": round(speed["read_tier"] / speed["read_client"], 3),
        "contains_ms": round(1000 * contains_s, 3),
        "ping_ms": round(1000 * ping_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--block-bytes", type=int, default=2_949_120)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=5)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = compare(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>12,}")


if __name__ == "__main__":
    main()
