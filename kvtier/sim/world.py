"""The state of a simulated run: its time and events, its tiers, and the current node."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from kvtier.core.identity import NO_TENANT
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.node.messages.actions import Write
from kvtier.sim.fault_profile import draw_fault_profile
from kvtier.sim.random_config import draw_config, policies, write_modes
from kvtier.sim.simulated_tier import SimulatedTier
from kvtier.testing.checked_eviction import CheckedEviction
from kvtier.testing.node_harness import FakeClock, HarnessSettings, NodeHarness, Work
from kvtier.tiers.ssd.settings import ssd_settings

__all__ = ["MS", "TENANTS", "World"]

MS = 1_000_000
"""Nanoseconds per millisecond, the unit of a run."""

TENANTS = (NO_TENANT, b"tenant number 1.")


class World:
    """State shared by all parts of a run. Events are ordered by time."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = draw = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self.fault_profile = draw_fault_profile(draw)
        self.clock = FakeClock()
        self.tiers = {
            name: SimulatedTier(
                300_000 if name.is_shared else draw.choice((150_000, 400_000)), name, draw
            )
            for name in SLOW_TIERS
        }
        self.faults: Counter[str] = Counter()
        """Faults injected so far, by name."""
        self.outages: set[TierName] = set()
        self.stalls: set[TierName] = set()
        self.lost: list[Work] = []
        """Work whose end this node never learns."""
        self.num_detaches = dict.fromkeys(self.tiers, 0)
        """How often each tier was detached, to recognize work from before."""
        self.cut_short: dict[Work, Callable[[], None]] = {}
        """Writes to the node's own disk in flight, each with the action that cuts it short."""
        self.num_boots = 0
        self.num_events_before = 0
        """Events of nodes that have crashed."""
        self.is_open = True
        self._config = config = draw_config(draw)
        self._settings = HarnessSettings(
            num_slabs=draw.choice((5, 8, 16)),
            slab_bytes=40_960,
            num_workers=draw.choice((1, 2, 3)),
            queue_bytes_max=draw.choice((30_000, 1 << 30)),
            min_tokens=draw.choice((0, 0, 256)),
            write=write_modes(config),
            flush_after_ns=ssd_settings(config).flush_after_ns,
            pin_share=config.policy.pin_share,
        )
        self._learned: dict[str, Any] = {}
        """State saved by the previous planner."""
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self.harness = self._boot()

    @property
    def num_events(self) -> int:
        """Return how many events all nodes of this run have handled."""
        return self.num_events_before + self.harness.num_events

    def at(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        heapq.heappush(self._events, (self.clock() + max(0, delay_ns), next(self._order), action))

    def next_ns(self) -> int | None:
        """Return the time of the next event; None if there is none."""
        return self._events[0][0] if self._events else None

    def step(self) -> None:
        """Run the next event; late, if the clock has jumped."""
        at_ns, _, action = heapq.heappop(self._events)
        self.clock.now_ns = max(at_ns, self.clock())
        action()

    def happens(self, chance: float, fault: str) -> bool:
        """Return whether a fault with this chance happens now, and count it."""
        if self.draw.random() >= chance:
            return False
        self.faults[fault] += 1
        return True

    def some_tier(self) -> TierName:
        """Choose one of the slower tiers."""
        return self.draw.choice(list(self.tiers))

    def note_detached(self, name: TierName) -> None:
        """Note that a tier was detached: writes in flight to the node's own disk are cut short."""
        self.num_detaches[name] += 1
        for work in list(self.cut_short):
            if isinstance(work, Write) and work.tier is name:
                self.cut_short.pop(work)()

    def crash(self) -> None:
        """Kill the node and start a new one with the same tiers."""
        self.num_events_before += self.harness.num_events
        self.harness.is_down = True
        if self.harness.node.planner is not None:
            self._learned = self.harness.node.planner.document()
        self.lost.clear()
        for leave_something in self.cut_short.values():
            leave_something()
        self.cut_short.clear()
        self.harness = self._boot()

    def _boot(self) -> NodeHarness:
        self.num_boots += 1
        boot = f"{self.seed}.{self.num_boots}"
        chosen = policies(self._config)
        chosen.planner.recall(self._learned)
        harness = NodeHarness(
            self.tiers,
            self._settings,
            clock=self.clock,
            boot=boot,
            eviction=CheckedEviction(chosen.eviction),
            admission=chosen.admission,
            history=chosen.history,
            planner=chosen.planner,
            depth=chosen.depth,
        )
        harness.recover({name: tier for name, tier in self.tiers.items() if not name.is_shared})
        return harness
