"""Daemons that die one after the other leave nothing behind in the process of an engine."""

import contextlib
import gc
import logging
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm

pytestmark = pytest.mark.slow

NUM_DAEMONS = 4
"""What is kept of each shows as a multiple of three."""

BLOCKS = list(range(1, 20))
AGAIN = list(range(21, 40))

OURS = ("grpc.", "kvtier.client.", "kvtier.errors.", "kvtier.transfer.")
"""What a session with a daemon is made of. What steps took is kept for the next one."""

POOLS = ("kvtier-lookup", "kvtier-load", "kvtier-store")
"""Their threads come as they are needed, up to a bound, and stay."""


def held() -> Counter[str]:
    """Count what this process has for a daemon: objects, threads, descriptors, mappings."""
    gc.collect()
    kinds = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    counts = Counter(kind for kind in kinds if kind.startswith(OURS))
    # The log has a timer for each event that it folds, of which there are only so many.
    threads = (each for each in threading.enumerate() if not isinstance(each, threading.Timer))
    counts["threads"] = sum(not thread.name.startswith(POOLS) for thread in threads)
    counts["descriptors"] = len(os.listdir("/proc/self/fd"))
    counts["arenas"] = Path("/proc/self/maps").read_text().count("memfd:kvtier-arena")
    return counts


def use_up(small: SmallVllm, daemon: Child, number: int) -> None:
    """Store some blocks, load them, and let the daemon die."""
    await_true(lambda: all(each.is_attached for each in small.clients), "both are attached")
    tokens = list(range(1000 * number, 1000 * number + 300))
    small.prefill(tokens, BLOCKS)
    assert small.prefill(tokens, AGAIN) == (256, set())
    daemon.kill()
    await_true(lambda: not any(each.is_attached for each in small.clients), "it is gone")


def test_daemons_that_die_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvtier")  # what is captured holds errors, and they links
    with work_directory() as directory:
        node, first, others = RunningNode(directory), Counter[str](), held()["arenas"]

        def more() -> Counter[str]:
            return held() - first

        with node.daemon() as early, SmallVllm(node.socket) as small:
            use_up(small, early, 0)
            await_true(lambda: held()["arenas"] <= others, "its arena is unmapped")
            first = held()
            for number in range(1, NUM_DAEMONS):
                with node.daemon() as daemon:
                    use_up(small, daemon, number)
            with contextlib.suppress(AssertionError):
                await_true(lambda: not more(), "nothing more is held than before")
            assert not more()
