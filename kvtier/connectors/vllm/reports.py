"""What a worker has to say of its orders: of each exactly once, well or badly."""

import threading
import time
from collections.abc import Iterable

from kvtier.connectors.vllm.order import Results, WorkerLoaded, WorkerLoadOrder, WorkerStoreOrder

__all__ = ["WorkerReports"]


class WorkerReports:
    """Kept by any thread until vLLM takes them, in its own order of calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results = Results()
        self._received: set[str] = set()
        self._missing: set[int] = set()

    def end_load(self, order: WorkerLoadOrder, num_filled: int) -> None:
        """Note that a load is over; nothing writes to its blocks any more."""
        empty = order.into[num_filled:]
        with self._lock:
            self._missing.update(block for blocks in empty for block in blocks if block >= 0)
            self._received.add(order.request_id)
            self._results.note_loaded(order.request_id, WorkerLoaded(num_filled, time.monotonic()))

    def end_store(self, order: WorkerStoreOrder) -> None:
        """Note that a store is over; nothing reads its blocks any more."""
        with self._lock:
            self._results.stored[order.number] += 1

    def refuse(self, orders: Iterable[WorkerLoadOrder | WorkerStoreOrder]) -> None:
        """Note that nothing comes of these."""
        for order in orders:
            if isinstance(order, WorkerLoadOrder):
                self.end_load(order, 0)
            else:
                self.end_store(order)

    def take_received(self) -> set[str]:
        """Take the requests whose loads are over."""
        with self._lock:
            received, self._received = self._received, set()
        return received

    def take_missing(self) -> set[int]:
        """Take the blocks of vLLM that no load has filled."""
        with self._lock:
            missing, self._missing = self._missing, set()
        return missing

    def take_results(self, step: int) -> Results | None:
        """Take what the scheduler half waits for in this step, if there is something."""
        with self._lock:
            results, self._results = self._results, Results()
        results.step = step
        return results or None
