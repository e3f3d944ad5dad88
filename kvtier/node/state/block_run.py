"""Finds the run of a chain that tiers can serve, with the tiers of each block and why it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import HASH_BYTES, chain_root, split_hashes
from kvtier.core.index import BlockIndex, Scope
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.table import Keys, Rows, as_keys

__all__ = ["BlockRun", "PromptChain", "chain_fault", "find_own", "find_run", "has_repeats"]

_BITS = np.array([1 << column for column in range(len(LOWER_TIERS))], dtype=np.uint8)
_SOURCES = tuple(
    tuple(tier for tier, is_there in zip(LOWER_TIERS, reversed(bits), strict=True) if is_there)
    for bits in product((False, True), repeat=len(LOWER_TIERS))
)
"""By bit mask, the tiers that have a block, fastest first."""


@dataclass(frozen=True, slots=True)
class PromptChain:
    """The hashes of a prompt's blocks from the root on, with the hash before each."""

    scope: Scope
    keys: Keys
    parents: Keys
    payload_bytes: int
    """Payload size of each block."""

    @classmethod
    def of(cls, scope: Scope, hashes: bytes, payload_bytes: int) -> "PromptChain":
        """Build a chain from the joined hashes of a message."""
        root = chain_root(scope.key_space, scope.tenant)
        keys = as_keys(hashes)
        parents = as_keys(root + hashes[:-HASH_BYTES]) if len(keys) else keys
        return cls(scope, keys, parents, payload_bytes)


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks that can be served: their rows, and a mask of tiers for each."""

    rows: Rows
    masks: npt.NDArray[np.uint8]
    is_writing: npt.NDArray[np.bool_]
    """Blocks being written into the CPU tier: pending rather than hits."""
    payload_bytes: int
    reason: str
    """``complete``, or why the next block is missing: ``absent``, or another ``identity``."""

    def __len__(self) -> int:
        return len(self.rows)

    def without(self, stuck: Sequence[int]) -> "BlockRun":
        """Return the run up to the first of these rows, which count as absent."""
        if not stuck or not (is_stuck := np.isin(self.rows, stuck)).any():
            return self
        return replace(self.head(int(is_stuck.argmax())), reason="absent")

    def head(self, length: int) -> "BlockRun":
        """Return the first ``length`` blocks, or all if there are fewer."""
        return replace(
            self,
            rows=self.rows[:length],
            masks=self.masks[:length],
            is_writing=self.is_writing[:length],
        )

    def sources(self, index: int) -> tuple[TierName, ...]:
        """Return the tiers that have a block, fastest first."""
        return _SOURCES[self.masks[index]]

    def by_tier(self) -> tuple[tuple[TierName, int], ...]:
        """Return the run in pieces: the fastest tier of each, and its number of blocks."""
        fastest = self.masks & (~self.masks + 1)  # the lowest bit set
        if not len(fastest):
            return ()
        starts = [0, *(np.flatnonzero(fastest[1:] != fastest[:-1]) + 1).tolist()]
        tiers = (_SOURCES[mask][0] for mask in fastest[starts].tolist())
        lengths = (end - first for first, end in pairwise([*starts, len(self)]))
        return tuple(zip(tiers, lengths, strict=True))


def find_own(index: BlockIndex, chain: PromptChain) -> tuple[Rows, int]:
    """Return the row of each block, and the index of the first block with another identity.

    An honest hash has one identity. A client that lies or miscounts must not reach other clients'
    blocks, disturb their order, or get good ones condemned because it expected other bytes.
    """
    rows = index.find(chain.keys)
    facts = index.facts(rows)
    is_own = facts["scope"] == index.known_scope(chain.scope)
    is_own &= facts["position"] == np.arange(len(rows))
    is_own &= facts["payload_bytes"] == chain.payload_bytes
    is_own &= facts["parent"][:, 0] == chain.parents[:, 0]
    is_own &= facts["parent"][:, 1] == chain.parents[:, 1]
    foreign = np.flatnonzero((rows >= 0) & ~is_own)
    return rows, int(foreign[0]) if len(foreign) else len(rows)


def find_run(
    index: BlockIndex, chain: PromptChain, first: int, usable: frozenset[TierName]
) -> BlockRun:
    """Return the run of blocks from ``first`` on in ``usable`` tiers. Changes nothing."""
    rows, own_end = find_own(index, chain)
    rows = rows[first : max(first, own_end)]
    state = index.facts(rows)["state"] * (rows >= 0)[:, None]
    is_there = state == Residency.READY
    is_there &= np.array([tier in usable for tier in LOWER_TIERS])
    is_writing = (state[:, 0] == Residency.WRITING) & (TierName.CPU in usable)
    is_there[:, 0] |= is_writing
    # While an expelled block's slot is held, the block cannot be read into the CPU tier.
    is_there &= (state[:, 0] != Residency.EVICTING)[:, None]
    masks = is_there @ _BITS
    gaps = np.flatnonzero(masks == 0)
    length = int(gaps[0]) if len(gaps) else len(rows)
    reason = "complete"
    if length < len(rows):
        reason = "absent"
    elif first + length < len(chain.keys):
        reason = "identity"
    return BlockRun(rows[:length], masks[:length], is_writing[:length], chain.payload_bytes, reason)


def has_repeats(hashes: bytes) -> bool:
    """Return whether joined hashes contain a block twice."""
    return len(set(split_hashes(hashes))) < len(hashes) // HASH_BYTES


def chain_fault(hashes: bytes, tenant: bytes, first: int) -> str:
    """Return the error in a chain from a client, or an empty string."""
    if len(hashes) % HASH_BYTES or len(tenant) != HASH_BYTES:
        return f"hashes and the tenant come in pieces of {HASH_BYTES} bytes"
    num_blocks = len(hashes) // HASH_BYTES
    if num_blocks > CHAIN_BLOCKS_MAX:
        return f"a chain of {num_blocks} blocks; {CHAIN_BLOCKS_MAX} is the most"
    if first > num_blocks:
        return f"first is {first} in a chain of {num_blocks} blocks"
    return ""
