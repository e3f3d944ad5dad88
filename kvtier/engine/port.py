"""The engine's only view of what lies below the GPU.

Contract
--------
* No call blocks: each takes microseconds and its result comes back from ``poll``. Every request
  ends in exactly one ``PortLookup`` (after ``lookup``) and one ``LoadEnded`` (after ``load``), and
  every store in exactly one ``StoreEnded``, by the port's own deadlines, whatever happens below.
* A chain is a prompt in blocks of ``block_tokens`` tokens. Each block is made of
  ``block_tokens / engine_block_tokens`` engine blocks, given as block ids of the engine's pool.
* A load fills blocks in order: from its first one on, or, ``from_back``, from its last one down,
  while the engine computes the first ones. The engine claims those with ``claim`` before it
  computes them, and the port writes only to blocks that are not claimed.
* While a load or a store is open, the port reads or writes the engine blocks named in it. The
  engine keeps them allocated until the ending event, also when the request is cancelled.
* Blocks beyond the reported ones hold garbage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.identity import BlockHash
from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import TierName

__all__ = [
    "KVPort",
    "LoadEnded",
    "LoadOrder",
    "LoadProgress",
    "NoPort",
    "PortChain",
    "PortEvent",
    "PortLookup",
    "StoreEnded",
    "StoreOffer",
]


@dataclass(frozen=True, slots=True)
class PortChain:
    """The block hashes of a request's tokens, from the root, full blocks only."""

    tenant: bytes
    root: BlockHash
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Which blocks a request wants loaded, and how."""

    request_id: str
    chain: PortChain
    first: int
    decision: int = 0
    """Of the plan that led to it, or 0."""
    from_back: bool = False
    wait_ns: int = 0
    """It ends by then with what is there; 0: by the port's own deadline."""


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """What is said of blocks that are offered."""

    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks of the chain from this one on hold generated tokens; -1: none does."""


@dataclass(frozen=True, slots=True)
class PortLookup:
    """The answer to a lookup: ``tiers[i]`` would serve block ``first + i``; then comes a miss."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """Why it ends where it ends: ``complete``, ``absent``, ``too_short``, ``daemon_away``, …"""
    plan: RestorePlan | None = None
    """How many of them to load, and how; without one, all of them."""
    max_offload_tokens: int | None = None
    """What it pays to offer of this request; None: all of it."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load: ``len(tiers)`` blocks, in its order, are verified and in place so far."""

    request_id: str
    tiers: tuple[TierName, ...]
    """Where they came from."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The end of a load: ``len(tiers)`` blocks, in its order, are in place, from these tiers."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """``complete``, or why it fell short: ``late``, ``failed``, ``cancelled``, ``daemon_away``;
    ``met`` where the engine had computed the rest."""


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """The end of a store: its engine blocks may be reused; ``num_blocks`` were taken."""

    store_id: int
    num_blocks: int


PortEvent = PortLookup | LoadProgress | LoadEnded | StoreEnded


class KVPort(Protocol):
    """What the engine may ask for. See the module's contract."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, whenever ``poll`` has something to return."""

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Say once of a request that it has come; ``first`` leading blocks need not be fetched.

        They are the engine's own, or it is about to ask for them. ``chain`` is the whole prompt;
        one that fills no block is not announced.
        """

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Ask which blocks of ``chain`` from index ``first`` on could and should be loaded.

        ``traits.request_id`` names the request.
        """

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """Fill engine blocks ``into[i]`` with block ``order.first + i`` of ``order.chain``."""

    def claim(self, request_id: str, num_computed: int) -> int:
        """Claim the first ``num_computed`` blocks of a load from the back, to compute them.

        Returns how many are granted, with earlier claims: fewer where the load has got there first,
        none where it has ended and its event is on the way. The port never writes to those, and
        ends when nothing is left.
        """

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Offer computed blocks; ``blocks[i]`` holds block ``first + i``. Returns a store id."""

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Say once of each request that its prompt is done with, and what came of its plan.

        That is so with its first token, or when it ends before.
        """

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Say what steps took, and what there is still to do."""

    def cancel(self, request_id: str) -> None:
        """Say that a lookup or load is no longer wanted; its ending event still comes."""

    def poll(self) -> list[PortEvent]:
        """Take what has happened since the last call."""

    def close(self) -> None:
        """End everything in flight and let go; the engine's pool is not touched afterwards."""


class NoPort:
    """A port with nothing below: the engine alone."""

    def __init__(self, block_tokens: int = 64) -> None:
        self.block_tokens = block_tokens
        self._events: list[PortEvent] = []
        self._num_stores = 0

    def bind(self, wake: Callable[[], None]) -> None:
        """Need no wake: events are there as soon as they are asked for."""

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Have nobody to tell."""

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Answer at once that nothing is there."""
        self._events.append(PortLookup(traits.request_id, (), "off"))

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """End at once with nothing."""
        self._events.append(LoadEnded(order.request_id, (), "off"))

    def claim(self, request_id: str, num_computed: int) -> int:
        """Have no load to shorten."""
        return 0

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Have nobody to tell."""

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Have nobody to tell."""

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Take nothing."""
        self._num_stores += 1
        self._events.append(StoreEnded(self._num_stores, 0))
        return self._num_stores

    def cancel(self, request_id: str) -> None:
        """Have nothing to cancel."""

    def poll(self) -> list[PortEvent]:
        """Take the events so far."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Have nothing to let go of."""
