"""Shared parts of a timed replay: its events, machine, trace and node."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.replay.node_adapter import NodeAdapter
from kvtier.sim.replay.setup import Machine, ReplayLink
from kvtier.sim.replay.trace import Trace

__all__ = ["EventQueue", "LinkTimer", "Pipe", "ReplayContext"]


class EventQueue:
    """Actions by time; those of the same time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._num_entries = 0

    def at(self, at_ns: int, action: Callable[[], None]) -> None:
        """Run an action at a time, or now if that has passed."""
        self._num_entries += 1
        heapq.heappush(self._entries, (max(at_ns, self.now_ns), self._num_entries, action))

    def step(self) -> bool:
        """Run the next action; False if there is none."""
        if not self._entries:
            return False
        self.now_ns, _, action = heapq.heappop(self._entries)
        action()
        return True


class Pipe:
    """A link that transfers one thing after another, in order."""

    def __init__(self, latency_s: float) -> None:
        self._latency_ns = round(latency_s * 1e9)
        self._free_ns = 0

    def arrival_ns(self, now_ns: int, seconds: float) -> int:
        """Return the arrival time of a transfer that is sent now and takes ``seconds``."""
        self._free_ns = max(now_ns, self._free_ns) + round(seconds * 1e9)
        return self._free_ns + self._latency_ns


@dataclass(frozen=True, slots=True)
class ReplayContext:
    """The parts of a timed replay. The adapter uses the event queue's clock."""

    trace: Trace
    machine: Machine
    events: EventQueue
    adapter: NodeAdapter

    @property
    def now_ns(self) -> int:
        """Return the simulated time."""
        return self.events.now_ns

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action after a delay."""
        self.events.at(self.events.now_ns + round(seconds * 1e9), action)

    def tick_at(self, at_ns: int, is_over: Callable[[], bool]) -> None:
        """Tell the node the time at a deadline, unless ``is_over`` by then."""

        def tick() -> None:
            if not is_over():
                self.adapter.post(ev.Tick())

        self.events.at(at_ns, tick)


class LinkTimer:
    """A ``TransferTimer`` for a tier with one link that reads and writes share."""

    def __init__(self, events: EventQueue, link: ReplayLink) -> None:
        self._events = events
        self._link = link
        self._pipe = Pipe(link.latency_s)

    def schedule(self, work: ac.Read | ac.Write, adapter: NodeAdapter) -> None:
        """Let the transfer take effect after its bytes have been transferred."""
        num_bytes = sum(block.header.payload_bytes for block in work.blocks)
        is_read = isinstance(work, ac.Read)
        rate = self._link.read_bytes_per_s if is_read else self._link.write_bytes_per_s
        began_ns = self._events.now_ns
        done_ns = self._pipe.arrival_ns(began_ns, num_bytes / rate)
        ended: list[bool] = []

        def finish() -> None:
            ended.append(True)
            adapter.finish(work, (self._events.now_ns - began_ns) / 1e9)

        self._events.at(done_ns, finish)
        if done_ns > work.deadline_ns:
            self._events.at(work.deadline_ns, lambda: None if ended else adapter.post(ev.Tick()))
