"""A trace in memory, at four bytes per block and request, and facts about its future.

Theory
------
A trace names each prefix many times. Each distinct block gets a number at its first use, and a
request is the array of its blocks' numbers; hashes are only computed once per number. A number
stands for the whole prefix up to the end of the block, for one tenant: the same content behind
another block is another number.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import HASH_BYTES, NO_TENANT
from kvtier.core.table import Keys, as_keys

__all__ = [
    "NEVER",
    "Blocks",
    "Numbering",
    "Trace",
    "TraceRequest",
    "continuations",
    "in_order",
    "next_uses",
    "numbered_keys",
    "optimal_hits",
]


Blocks = npt.NDArray[np.int32]
"""Numbers of the blocks of a chain, from its root on."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Times count from the first request."""

    at_ns: int
    blocks: Blocks
    """Its full blocks."""
    num_tokens: int
    """Prompt tokens, including those after the last full block."""
    num_output_tokens: int = 0
    tenant: bytes = NO_TENANT
    kind: str = ""
    continues: float | None = None
    """The client's hint; see ``RequestTraits``."""
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the hashes of all their blocks."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    keys: Keys
    """Hashes by block number."""
    notes: tuple[str, ...] = ()
    """Caveats for readers of its results."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """Return the time from the first to the last request."""
        return (self.requests[-1].at_ns - self.requests[0].at_ns) / 1e9 if self.requests else 0.0

    @property
    def num_distinct(self) -> int:
        """Return the number of distinct blocks."""
        return len(self.keys)

    @property
    def num_blocks_max(self) -> int:
        """Return the length of the longest chain."""
        return max((len(request.blocks) for request in self.requests), default=0)

    def hashes(self, blocks: Blocks) -> bytes:
        """Return the concatenated hashes of blocks, as in messages."""
        return self.keys[blocks].tobytes()

    def cut(self, num_requests: int) -> "Trace":
        """Return the first ``num_requests`` requests as a trace."""
        return replace(self, requests=self.requests[:num_requests])


class Numbering:
    """Numbers blocks while a trace is read."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Hashable], int] = {}
        self._roots: dict[bytes, int] = {}

    def number(self, tenant: bytes, contents: Iterable[Hashable]) -> Blocks:
        """Return the numbers of a chain's blocks, given their contents."""
        numbers = self._numbers
        before = self._roots.setdefault(tenant, -1 - len(self._roots))
        chain: list[int] = []
        for content in contents:
            before = numbers.setdefault((before, content), len(numbers))
            chain.append(before)
        return np.array(chain, np.int32)

    def keys(self) -> Keys:
        """Return a hash for each number: uniform, and the same in every run."""
        return numbered_keys(len(self._numbers))


def numbered_keys(count: int) -> Keys:
    """Return hashes for the numbers below ``count``."""
    digests = (
        hashlib.blake2b(number.to_bytes(8, "little"), digest_size=HASH_BYTES).digest()
        for number in range(count)
    )
    return as_keys(b"".join(digests))


def in_order(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """Return requests by arrival, the first one at time 0; ties keep their order."""
    start_ns = min((request.at_ns for request in requests), default=0)
    ordered = sorted(requests, key=lambda request: request.at_ns)
    return tuple(replace(request, at_ns=request.at_ns - start_ns) for request in ordered)


NEVER = np.iinfo(np.int32).max
"""The next use of a block that is not used again."""

_HINT_NS = 600 * 10**9
"""A client's hint says whether its chain continues within ten minutes."""


def next_uses(trace: Trace) -> list[npt.NDArray[np.int32]]:
    """Return for each request the number of the next request that uses each of its blocks."""
    coming = np.full(trace.num_distinct, NEVER, np.int32)
    uses: list[npt.NDArray[np.int32]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append(coming[blocks])
        coming[blocks] = number
    uses.reverse()
    return uses


def continuations(trace: Trace) -> list[bool]:
    """Return for each request whether its last block is used again within ten minutes."""
    found: list[bool] = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        then = int(uses[-1]) if len(uses) else NEVER
        is_soon = then != NEVER and trace.requests[then].at_ns - request.at_ns <= _HINT_NS
        found.append(is_soon)
    return found


def optimal_hits(trace: Trace, num_blocks: int) -> Sequence[int]:
    """Return the leading hits of each request under the optimal policy.

    The policy keeps the blocks that are used next, and does not admit a block that would be evicted
    at once (Belady's rule with bypassing). A parent is used whenever its child is, so chains stay
    whole.
    """
    next_of: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits: list[int] = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        chain = request.blocks.tolist()
        num_hits = 0
        for block in chain:
            if block not in next_of:
                break
            num_hits += 1
        hits.append(num_hits)
        for depth, (block, use) in enumerate(zip(chain, uses.tolist(), strict=True)):
            if use == NEVER:
                next_of.pop(block, None)
            else:
                next_of[block] = use
                heappush(furthest, (-use, -depth, block))
        while len(next_of) > num_blocks:
            use, _, block = heappop(furthest)
            if next_of.get(block) == -use:
                del next_of[block]
    return hits
