"""The worker half: copies between vLLM's tensors and the arena, on threads of its own.

Rules
-----
* vLLM keeps the blocks of an open store, and of an open load, until their result is told: nothing
  here has to hurry, and nothing is waited for in a step.
* Whatever does not come in time is reported as blocks that are not there; vLLM computes them.
"""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvtier.client import Client, LoadedBlock
from kvtier.connectors.vllm.order import LoadOrder, Orders, Results, StoreOrder
from kvtier.connectors.vllm.pages import Pages
from kvtier.errors import DaemonSlow, DaemonUnavailable

__all__ = ["WorkerHalf"]

_NUM_READERS = 4
"""What they wait for lies in the arena already; they share the memory's bandwidth."""


class WorkerHalf:
    """Carries out orders with a client, which it closes with itself."""

    def __init__(self, client: Client, pages: Pages) -> None:
        self._client = client
        self._pages = pages
        self._lock = threading.Lock()
        self._stored: Counter[int] = Counter()
        self._loaded: Counter[str] = Counter()
        self._received: set[str] = set()
        self._missing: set[int] = set()
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kvtier-load")
        self._writer = ThreadPoolExecutor(1, "kvtier-store")

    def load(self, orders: Orders) -> None:
        """Begin the loads of a step."""
        for order in orders.loads:
            self._readers.submit(self._load, order)

    def store(self, orders: Orders) -> None:
        """Begin the stores of a step, whose blocks are computed now."""
        for order in orders.stores:
            self._writer.submit(self._store, order)

    def take_received(self) -> set[str]:
        """Take the requests whose loads are over, well or badly."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_missing(self) -> set[int]:
        """Take the blocks of vLLM that no load has filled."""
        with self._lock:
            missing, self._missing = self._missing, set()
        return missing

    def take_results(self) -> Results | None:
        """Take what the scheduler half waits for, if there is something."""
        with self._lock:
            results = Results(self._stored, self._loaded)
            self._stored, self._loaded = Counter(), Counter()
        return results if results.stored or results.loaded else None

    def close(self) -> None:
        """Finish what is under way and end the session."""
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        self._client.close()

    def _load(self, order: LoadOrder) -> None:
        filled = 0
        try:
            filled = self._fill(order)
        except DaemonUnavailable:
            pass  # the client has said so, and vLLM computes
        finally:
            missing = {block for blocks in order.into[filled:] for block in blocks if block >= 0}
            with self._lock:
                self._missing |= missing
                self._received.add(order.request_id)
                self._loaded[order.request_id] += 1

    def _fill(self, order: LoadOrder) -> int:
        """Copy blocks as they come, and return how many are good."""
        left_s = min(self._client.deadlines.load_s, order.good_until_s - time.monotonic())
        if left_s <= 0:
            return 0
        filled = 0
        hashes = order.hashes[: order.first + len(order.into)]
        for item in self._client.load(
            order.tenant, hashes, order.first, decision=order.decision, timeout_s=left_s
        ):
            if not isinstance(item, LoadedBlock):
                break
            self._pages.scatter(item.payload, order.into[item.index - order.first])
            if time.monotonic() > item.good_until_s:
                raise DaemonSlow("the lease ran out while copying")
            filled = item.index - order.first + 1
        return filled

    def _store(self, order: StoreOrder) -> None:
        def copy(index: int, slot: memoryview) -> None:
            self._pages.gather(order.blocks[index - order.first], slot)

        try:
            self._client.store(
                order.tenant,
                order.hashes,
                order.first,
                copy,
                traits=order.traits,
                num_prompt_blocks=order.num_prompt_blocks,
            )
        except DaemonUnavailable:
            pass  # offered again when a later request has these blocks
        finally:
            with self._lock:
                self._stored[order.number] += 1
