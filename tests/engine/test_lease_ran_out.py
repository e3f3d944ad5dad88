"""What was copied while its lease ran out is not used: the slot may have had other contents."""

import math
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client import ClientDeadlines, LoadedBlock
from kvtier.connectors.integrated import DaemonPort
from kvtier.connectors.vllm.jobs import LoadJob as VllmOrder
from kvtier.connectors.vllm.jobs import StepJobs
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.connectors.vllm_tier.chain import ChunkRun
from kvtier.connectors.vllm_tier.transfers import ChunkJob, ChunkTransfers
from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.residency import TierName
from kvtier.engine.port import LoadEnded, LoadOrder, LoadProgress, PortChain
from kvtier.testing.child import await_true

HASHES = tuple(BlockHash(bytes([number]) * 16) for number in range(3))
NEVER, ALWAYS = -math.inf, math.inf


class LeasingClient:
    """Hands out three blocks, each under a lease of its own length."""

    deadlines = ClientDeadlines(5, 5, 5, 1)
    is_attached = True

    def __init__(self, leases: Sequence[float]) -> None:
        self._leases = leases

    def load(self, *_: object, **__: object) -> Iterator[LoadedBlock | str]:
        for index, good_until_s in enumerate(self._leases):
            yield LoadedBlock(index, TierName.CPU, memoryview(bytes(64)), good_until_s)
        yield "complete"

    def wait_attached(self, _timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        """Have nothing to close."""


LEASES = pytest.mark.parametrize(
    ("leases", "num_good"),
    [
        ([ALWAYS, ALWAYS, ALWAYS], 3),
        ([ALWAYS, ALWAYS, NEVER], 2),
        ([ALWAYS, NEVER, ALWAYS], 1),
        ([NEVER, ALWAYS, ALWAYS], 0),
    ],
)


@LEASES
def test_of_the_integrated_engine(leases: Sequence[float], num_good: int) -> None:
    client: Any = LeasingClient(leases)
    pool: Any = SimpleNamespace(write_block=lambda _block, _source: None)
    port = DaemonPort(client, pool, block_tokens=64, engine_block_bytes=64)
    order = LoadOrder("a", PortChain(NO_TENANT, HASHES[0], HASHES), 0)
    port.load(order, [[0], [1], [2]])
    events: list[Any] = []
    await_true(
        lambda: events.extend(port.poll()) or any(isinstance(e, LoadEnded) for e in events),
        "the load is over",
    )
    assert len(events[-1].tiers) == num_good
    assert sum(isinstance(event, LoadProgress) for event in events) == num_good
    port.close()


@LEASES
def test_of_vllm(leases: Sequence[float], num_good: int) -> None:
    client: Any = LeasingClient(leases)
    copies: Any = SimpleNamespace(
        num_readers=1,
        fence=lambda: SimpleNamespace(is_over=lambda: True, wait=lambda: None),
        is_staged=lambda _slot: False,
        scatter=lambda _payloads, _blocks: None,
        close=lambda: None,
    )
    worker = WorkerHalf(client, copies)
    into = ((0,), (1,), (2,))
    order = VllmOrder("a", NO_TENANT, (HASHES,), 0, into, (1,), time.monotonic() + 60)
    worker.load(StepJobs(loads=[order]))
    received: set[str] = set()
    await_true(
        lambda: received.update(worker.reports.take_received() or ()) or received == {"a"},
        "the load is over",
    )
    assert worker.reports.take_missing() == set(range(num_good, 3))
    worker.close()


@LEASES
def test_of_a_tier_behind_vllm(leases: Sequence[float], num_good: int) -> None:
    client: Any = LeasingClient(leases)
    transfers = ChunkTransfers(client, memoryview(bytearray(3 * 64)).cast("b", (3, 64)))
    names = (b"a", b"b", b"c")
    run = ChunkRun(0, names, chunks=(0, 1, 2))
    transfers.load(ChunkJob(1, "request", hashes=HASHES, runs=[run]), 3)
    transfers.drain(5)
    (ended,) = transfers.take_ended()
    assert tuple(ended.names) == names[:num_good]
    assert tuple(ended.missing) == names[num_good:]
    transfers.close(5)
