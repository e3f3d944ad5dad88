"""The engine's only view of what lies below the GPU.

Contract
--------
* No call blocks: each takes microseconds and its result comes back from ``poll``. Every request
  ends in exactly one ``Found`` (after ``lookup``) and one ``LoadEnded`` (after ``load``), every
  store in exactly one ``Stored``, by the port's own deadlines, whatever happens below.
* A chain is a prompt in blocks of ``block_tokens`` tokens. Each block is made of
  ``block_tokens / engine_block_tokens`` engine blocks, given as block ids of the engine's pool.
* While a load or a store is open, the port reads or writes the engine blocks named in it. The
  engine keeps them allocated until the ending event, also when the request is cancelled.
* A load fills leading blocks in order. Blocks beyond the reported ones hold garbage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.identity import BlockHash
from kvtier.core.residency import TierName

__all__ = ["Chain", "Found", "KVPort", "LoadEnded", "Loaded", "NoPort", "PortEvent", "Stored"]


@dataclass(frozen=True, slots=True)
class Chain:
    """The block hashes of a request's tokens, from the root, full blocks only."""

    tenant: bytes
    root: BlockHash
    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup: ``tiers[i]`` would serve block ``first + i``; then comes a miss."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """Why it ends where it ends: ``complete``, ``absent``, ``too_short``, ``daemon_away``, …"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Progress of a load: ``num_blocks`` leading blocks of it are now verified and in place."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The end of a load: the leading ``len(tiers)`` blocks are in place, from these tiers."""

    request_id: str
    tiers: tuple[TierName, ...]
    reason: str
    """``complete``, or why it fell short: ``late``, ``failed``, ``cancelled``, ``daemon_away``."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The end of a store: its engine blocks may be reused; ``num_blocks`` were taken."""

    store_id: int
    num_blocks: int


PortEvent = Found | Loaded | LoadEnded | Stored


class KVPort(Protocol):
    """What the engine may ask for. See the module's contract."""

    @property
    def block_tokens(self) -> int:
        """Return the tokens of a block."""

    def bind(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, whenever ``poll`` has something to return."""

    def lookup(self, request_id: str, chain: Chain, first: int) -> None:
        """Ask which blocks of ``chain`` from index ``first`` on could be loaded."""

    def load(
        self, request_id: str, chain: Chain, first: int, into: Sequence[Sequence[int]]
    ) -> None:
        """Fill engine blocks ``into[i]`` with block ``first + i`` of ``chain``."""

    def store(self, chain: Chain, first: int, blocks: Sequence[Sequence[int]]) -> int:
        """Offer computed blocks; ``blocks[i]`` holds block ``first + i``. Returns a store id."""

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

    def lookup(self, request_id: str, chain: Chain, first: int) -> None:
        """Answer at once that nothing is there."""
        self._events.append(Found(request_id, (), "off"))

    def load(
        self, request_id: str, chain: Chain, first: int, into: Sequence[Sequence[int]]
    ) -> None:
        """End at once with nothing."""
        self._events.append(LoadEnded(request_id, (), "off"))

    def store(self, chain: Chain, first: int, blocks: Sequence[Sequence[int]]) -> int:
        """Take nothing."""
        self._num_stores += 1
        self._events.append(Stored(self._num_stores, 0))
        return self._num_stores

    def cancel(self, request_id: str) -> None:
        """Have nothing to cancel."""

    def poll(self) -> list[PortEvent]:
        """Take the events so far."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Have nothing to let go of."""
