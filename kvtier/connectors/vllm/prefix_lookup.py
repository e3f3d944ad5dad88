"""One request's question to the daemon: what it has of a prompt, held in place until it is copied.

A search runs on a thread of its own. For each rank it asks what can be loaded, has the daemon bring
up as much of it as the plans say, and keeps the leases: what it then names lies verified in the
arena for all ranks, and stays there until ``release`` or ``good_until_s``.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvtier.client import Client, FoundBlocks, HeldBlocks
from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable
from kvtier.observe.trace import TRACES

__all__ = ["PrefixLookup"]

_WAIT_SHARE = 1.2
_WAIT_MARGIN_S = 0.05
"""The daemon ends a load by its plan, and we do so a fifth and this much later."""

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class PrefixLookup:
    """Begin with ``run``; what it found may be read once ``is_over``."""

    clients: Sequence[Client]
    """Of the ranks."""
    tenant: bytes
    chains: Sequence[Sequence[BlockHash]]
    """By rank."""
    first: int
    traits: RequestTraits
    load: EngineLoad
    traceparent: str = ""
    """Of the request, where it is traced."""
    is_over: bool = False
    is_unwanted: bool = False
    has_failed: bool = False
    num_blocks: int = 0
    """Held for every rank, from ``first`` on."""
    decisions: Sequence[int] = ()
    """By rank."""
    good_until_s: float = 0.0
    max_offload_tokens: int | None = None
    empty_until_s: float = 0.0
    """Some rank's tiers have nothing at all until then, but what is stored since it began."""
    began_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    _held: list[HeldBlocks] = field(default_factory=list)

    @property
    def tiers(self) -> Sequence[TierName]:
        """Return where the blocks come from that are held."""
        return self.tiers_of(0)

    def tiers_of(self, rank: int) -> Sequence[TierName]:
        """Return where a rank's blocks come from."""
        return self._held[rank].tiers[: self.num_blocks] if self.num_blocks else ()

    def run(self) -> None:
        """Ask, and hold what is found. Ends by the client's deadlines."""
        try:
            if not self.is_unwanted:
                self._run()
        except DaemonUnavailable:
            self.has_failed = True  # the client has said so, and vLLM computes
        except BaseException:
            self.has_failed = True
            raise
        finally:
            if not self.num_blocks:
                self.release()
            self.took_s = time.monotonic() - self.began_s
            self.is_over = True
            if self.is_unwanted:
                self.release()

    def release(self) -> None:
        """Let go of what is held, and of what will be. Never waits."""
        self.is_unwanted = True
        for held in list(self._held):
            held.release()

    def _run(self) -> None:
        founds = self._for_each(self._look_up)
        advised = [
            each.max_offload_tokens for each in founds if each.max_offload_tokens is not None
        ]
        self.max_offload_tokens = min(advised, default=None)
        if empty_s := max(found.empty_s for found in founds):
            self.empty_until_s = time.monotonic() + empty_s
        self.decisions = [found.plan.decision if found.plan else 0 for found in founds]
        wanted = min(map(_planned_blocks, founds))
        if not wanted or self.is_unwanted:
            return
        most_s = self.clients[0].deadlines.load_s
        wait_s = min(most_s, max(_wait_s(found, most_s) for found in founds))
        held = self._for_each(partial(self._hold, wanted, wait_s))
        self._held = held
        self.good_until_s = min(each.good_until_s for each in held)
        self.num_blocks = min(len(each.tiers) for each in held)

    def _look_up(self, rank: int) -> FoundBlocks:
        client, chain = self.clients[rank], self.chains[rank]
        with TRACES.forward("lookup", self.traceparent) as mark:
            found = client.lookup(self.tenant, chain, self.first, self.traits, self.load)
            mark.set(asked_blocks=len(chain) - self.first, found_blocks=len(found.tiers))
        return found

    def _hold(self, wanted: int, wait_s: float, rank: int) -> HeldBlocks:
        with TRACES.forward("hold", self.traceparent) as mark:
            held = self.clients[rank].hold(
                self.tenant,
                self.chains[rank][: self.first + wanted],
                self.first,
                decision=self.decisions[rank],
                timeout_s=wait_s,
            )
            self._held.append(held)  # at once: where another rank fails, this one is let go of
            mark.set(wanted_blocks=wanted, held_blocks=len(held.tiers), end=held.end)
        return held

    def _for_each(self, ask: Callable[[int], _Answer]) -> list[_Answer]:
        """Ask for all ranks at the same time."""
        if len(self.clients) == 1:
            return [ask(0)]
        with ThreadPoolExecutor(len(self.clients), "kvtier-rank") as ranks:
            return list(ranks.map(ask, range(len(self.clients))))


def _planned_blocks(found: FoundBlocks) -> int:
    num_found = len(found.tiers)
    return num_found if found.plan is None else min(num_found, found.plan.num_blocks)


def _wait_s(found: FoundBlocks, most_s: float) -> float:
    if found.plan is None or not found.plan.wait_ns:
        return most_s
    return _WAIT_SHARE * found.plan.wait_ns / 1e9 + _WAIT_MARGIN_S
