"""The engine's interface to the tiers below the GPU.

Contract
--------
* No call blocks: each takes microseconds and its result comes from ``poll``. Every ``lookup`` ends
  in exactly one ``PortLookup``, every ``load`` in one ``LoadEnded`` and every ``store`` in one
  ``StoreEnded``, within the port's own deadlines, whatever happens below.
* A chain is a prompt in blocks of ``block_tokens`` tokens. Each block consists of ``block_tokens /
  engine_block_tokens`` engine blocks, given as block ids of the engine's pool.
* A load fills blocks in order: from its first one on, or, with ``from_back``, from its last one
  down while the engine computes the first ones. The engine claims blocks with ``claim`` before it
  computes them, and the port only writes to unclaimed blocks.
* While a load or a store is open, the port reads or writes the engine blocks named in it. The
  engine keeps them allocated until the ending event, even if the request is cancelled.
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
    """Number of the plan that led to the load; 0: none."""
    from_back: bool = False
    wait_ns: int = 0
    """The load ends after this time with the blocks in place; 0: at the port's own deadline."""


@dataclass(frozen=True, slots=True)
class StoreOffer:
    """Attributes of offered blocks."""

    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks of the chain from this index on hold generated tokens; -1: none does."""


@dataclass(frozen=True, slots=True)
class PortLookup:
    """The answer to a lookup: ``tiers[i]`` would serve block ``first + i``, up to a miss."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """Why the found blocks end there: ``complete``, ``absent``, ``daemon_away``, …"""
    plan: RestorePlan | None = None
    """How many of them to load, and how; None: load all of them."""
    max_offload_tokens: int | None = None
    """How many of the request's tokens are worth offering; None: all of them."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of a load: its first ``len(tiers)`` blocks are verified and in place."""

    request_id: str
    tiers: tuple[TierName, ...]
    """The source of each block."""


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The end of a load: the first ``len(tiers)`` blocks, in its order, are in place."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """``complete``, or why it fell short: ``late``, ``failed``, ``cancelled``, ``daemon_away``;
    ``met`` if the engine had computed the rest."""


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """The end of a store: ``num_blocks`` were stored, and its engine blocks may be reused."""

    store_id: int
    num_blocks: int


PortEvent = PortLookup | LoadProgress | LoadEnded | StoreEnded


class KVPort(Protocol):
    """The calls available to the engine. See the module's contract."""

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens per block."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, whenever ``poll`` has something to return."""

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Announce a new request, once; its ``first`` leading blocks need not be prefetched.

        Those are in the engine's pool, or about to be loaded. ``chain`` is the whole prompt. A
        prompt that does not fill a block is not announced.
        """

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Ask which blocks of ``chain`` from index ``first`` on can and should be loaded.

        ``traits.request_id`` names the request.
        """

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """Load block ``order.first + i`` of ``order.chain`` into engine blocks ``into[i]``."""

    def claim(self, request_id: str, num_computed: int) -> int:
        """Claim the first ``num_computed`` blocks of a load from the back, to compute them.

        Returns how many are granted, including earlier claims: fewer if the load got there first,
        none if it has ended and its event is on the way. The port never writes to granted blocks,
        and ends the load when no others are left.
        """

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Offer computed blocks; ``blocks[i]`` holds block ``first + i``. Returns a store id."""

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Report, once per request, that its prompt is done, and the outcome of its plan.

        Called at the first token, or if the request ends before that.
        """

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Report step durations and the current load."""

    def cancel(self, request_id: str) -> None:
        """Cancel a lookup or load; its ending event still comes."""

    def poll(self) -> list[PortEvent]:
        """Return the events since the last call."""

    def close(self) -> None:
        """End everything in flight; the engine's pool is not accessed afterwards."""


class NoPort:
    """A port without tiers, for an engine on its own."""

    def __init__(self, block_tokens: int = 64) -> None:
        self.block_tokens = block_tokens
        self._events: list[PortEvent] = []
        self._num_stores = 0

    def bind(self, wake: Callable[[], None]) -> None:
        """Ignored: events are available at once."""

    def announce(self, chain: PortChain, first: int, traits: RequestTraits) -> None:
        """Ignored."""

    def lookup(self, chain: PortChain, first: int, traits: RequestTraits, load: EngineLoad) -> None:
        """Answer at once that nothing was found."""
        self._events.append(PortLookup(traits.request_id, (), "off"))

    def load(self, order: LoadOrder, into: Sequence[Sequence[int]]) -> None:
        """End at once without a block."""
        self._events.append(LoadEnded(order.request_id, (), "off"))

    def claim(self, request_id: str, num_computed: int) -> int:
        """Grant nothing: no load is open."""
        return 0

    def finish(self, request_id: str, outcome: PlanOutcome | None) -> None:
        """Ignored."""

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Ignored."""

    def store(
        self, chain: PortChain, first: int, blocks: Sequence[Sequence[int]], offer: StoreOffer
    ) -> int:
        """Take nothing."""
        self._num_stores += 1
        self._events.append(StoreEnded(self._num_stores, 0))
        return self._num_stores

    def cancel(self, request_id: str) -> None:
        """Ignored."""

    def poll(self) -> list[PortEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Do nothing."""
