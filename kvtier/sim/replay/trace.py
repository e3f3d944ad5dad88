"""A trace in memory: who asked when, for which blocks; four bytes a block and a request.

Theory
------
A trace names each prefix many times. Every distinct block gets a number when it is first met, and a
request is the array of its blocks' numbers; keys are only made for a number, once. A block's number
stands for the whole prefix up to its end, of its tenant: the same content behind another block is
another number.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import HASH_BYTES, NO_TENANT
from kvtier.core.table import Keys, as_keys

__all__ = ["Blocks", "Numbering", "Trace", "TraceRequest", "in_order", "numbered_keys"]

Blocks = npt.NDArray[np.int32]
"""Numbers of blocks, of one chain from its root on."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace; times count from the trace's first request."""

    at_ns: int
    blocks: Blocks
    """Its full blocks."""
    num_tokens: int
    """Of the prompt, those behind its last full block included."""
    num_output_tokens: int = 0
    tenant: bytes = NO_TENANT
    kind: str = ""
    continues: float | None = None
    """What its client said of it; see ``Traits``."""
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival, and the keys of all their blocks."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    keys: Keys
    """By number of a block."""
    notes: tuple[str, ...] = ()
    """What one should know who reads figures of it."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Return the time from the first to the last request."""
        return (self.requests[-1].at_ns - self.requests[0].at_ns) / 1e9 if self.requests else 0.0

    @property
    def num_distinct(self) -> int:
        """Return how many distinct blocks there are."""
        return len(self.keys)

    @property
    def num_blocks_max(self) -> int:
        """Return the length of the longest chain."""
        return max((len(request.blocks) for request in self.requests), default=0)

    def hashes(self, blocks: Blocks) -> bytes:
        """Return the hashes of blocks, joined as they travel in messages."""
        return self.keys[blocks].tobytes()

    def cut(self, num_requests: int) -> "Trace":
        """Return the trace up to so many requests."""
        return replace(self, requests=self.requests[:num_requests])


class Numbering:
    """Numbers blocks as a trace is read."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._roots: dict[bytes, int] = {}

    def number(self, tenant: bytes, contents: Iterable[Hashable]) -> Blocks:
        """Return the numbers of a chain's blocks, each given by its content."""
        numbers = self._numbers
        before = self._roots.setdefault(tenant, -1 - len(self._roots))
        chain: list[int] = []
        for content in contents:
            before = numbers.setdefault((before, content), len(numbers))
            chain.append(before)
        return np.array(chain, np.int32)

    def keys(self) -> Keys:
        """Return a key for each number: as uniform as a hash, and the same in every run."""
        return numbered_keys(len(self._numbers))


def numbered_keys(count: int) -> Keys:
    """Return keys for the first numbers."""
    digests = (
        hashlib.blake2b(number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()
        for number in range(count)
    )
    return as_keys(b"".join(digests))


def in_order(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return requests by arrival, the first one at time 0; ties stay as they were."""
    start_ns = min((request.at_ns for request in requests), default=0)
    ordered = sorted(requests, key=lambda request: request.at_ns)
    return tuple(replace(request, at_ns=request.at_ns - start_ns) for request in ordered)
