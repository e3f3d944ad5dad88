"""A remote tier in a process that may start no more threads for a while."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvtier.core.identity import BlockHash
from kvtier.errors import TierError
from kvtier.testing.child import free_port
from kvtier.testing.tier_contract import soon
from kvtier.tiers.redis.server_batch import FanOut
from kvtier.tiers.redis.tier import RedisOptions, RedisTier

OPTIONS = RedisOptions(num_workers=2, timeout_s=0.05)
HASHES = [BlockHash(bytes(16))]


@contextmanager
def no_thread(monkeypatch: pytest.MonkeyPatch, named: str) -> Iterator[threading.Event]:
    """Let no thread begin whose name begins so; yields what is set once one was refused."""
    start, refused = threading.Thread.start, threading.Event()

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(named):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start_or_refuse)
        yield refused


def test_no_connection_is_lost_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RedisTier(f"redis://127.0.0.1:{free_port()}", OPTIONS)
    with no_thread(monkeypatch, "remote-connect"):
        for _ in range(2 * OPTIONS.num_workers):
            with pytest.raises(TierError, match="can't start new thread"):
                tier.contains(HASHES, soon())
    with pytest.raises(TierError, match="refused"):  # there is no server, but it is asked
        tier.contains(HASHES, soon())
    tier.close()


def test_the_servers_are_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = RedisTier(f"redis+cluster://127.0.0.1:{free_port()}", OPTIONS)
    with no_thread(monkeypatch, "remote-look"), pytest.raises(TierError, match=r"in time|deadline"):
        tier.contains(HASHES, time.monotonic_ns() + 10**7)
    with pytest.raises(TierError, match="no cluster node answers"):
        tier.contains(HASHES, soon())
    tier.close()


def test_what_found_no_thread_does_not_begin_once_its_call_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would fill memory that is somebody else's by then."""
    parts, is_over = FanOut(4), threading.Event()
    begun: list[bool] = []
    with (
        no_thread(monkeypatch, "remote-part_1") as refused,
        pytest.raises(TierError, match="can't start new thread"),
    ):
        parts.run([lambda: refused.wait(30), lambda: begun.append(is_over.is_set())])
    is_over.set()
    assert parts.run([lambda: 1, lambda: 2]) == [1, 2]
    assert True not in begun
    parts.close()
