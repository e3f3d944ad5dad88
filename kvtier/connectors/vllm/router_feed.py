"""What a router that listens to vLLM is to hear: which blocks came to a medium, and which left.

Theory
------
The daemon tells of its blocks by our hashes; a router knows vLLM's. What stands between the two,
vLLM's names of a block, its tokens and what came before it, is known for as long as this process
remembers a request that had the block. So a block that others stored, or that an earlier life of
this engine did, is announced once a request of this engine has met it, and not before.

Rules
-----
* A block is announced once for a medium and withdrawn once. Blocks of ours that part inside have
  some of vLLM's in common, and each tells of them: routers count, as vLLM expects of them.
* A medium has a block while every rank has it there: what one rank lacks nobody can load.
* Of what may be told those nearest to a root come first, over several takes as well: some routers
  drop a block whose parent they do not know, and do not hear of it again.
* What is remembered is bounded. What was met the longest ago is forgotten, from the end of its
  chain, and withdrawn.
* Several changes of a block between two takes are one, or none.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.client.types import OnChanges
from kvtier.connectors.kit.residency import TIER_BIT, BlockResidency
from kvtier.connectors.vllm.request import TrackedRequest
from kvtier.core.identity import HASH_BYTES, BlockHash
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.core.residency_change import ResidencyChange
from kvtier.core.table import Keys, as_keys

__all__ = [
    "CPU",
    "MEDIA",
    "STORAGE",
    "BlockNames",
    "Describe",
    "RoutedBlock",
    "RouterFeed",
    "RouterUpdate",
    "runs_of",
]

CPU, STORAGE = 1, 2
MEDIA = (CPU, STORAGE)
"""As bits: SSD and Redis are one medium in vLLM's events."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """What vLLM calls the blocks of its own that make one of ours, and what they are of."""

    names: tuple[Any, ...]
    parent_name: Any
    token_ids: npt.NDArray[np.uint32]
    extra_keys: tuple[Any, ...] | None = None
    lora: tuple[int, str] | None = None


@dataclass(slots=True)
class RoutedBlock:
    """One of our blocks that a request of this engine had."""

    keys: tuple[BlockHash, ...]
    """One for each rank."""
    parent: BlockHash | None
    """Of the first rank; None at the root."""
    position: int
    facts: BlockNames
    media: int = 0
    """In which it is announced."""
    is_cleared: bool = False
    """vLLM has said that it is gone."""
    num_children: int = 0
    """That are remembered."""


@dataclass(slots=True)
class RouterUpdate:
    """What is to be published: first what was withdrawn, by medium, then what came."""

    withdrawn: dict[int, list[Any]] = field(default_factory=dict)
    """Names of vLLM's."""
    announced: list[tuple[int, list[RoutedBlock]]] = field(default_factory=list)
    """Runs of one medium, each block the child of the one before it; parents come first."""

    def withdraw(self, block: RoutedBlock, media: int) -> None:
        """Add a block to what was withdrawn from media."""
        for medium in MEDIA:
            if media & medium:
                self.withdrawn.setdefault(medium, []).extend(block.facts.names)


def runs_of(blocks: Sequence[RoutedBlock]) -> Iterator[list[RoutedBlock]]:
    """Yield blocks as runs of child after parent; no run comes before that of its parent."""
    left = {block.keys[0]: block for block in blocks}
    children = {block.parent: block for block in blocks if block.parent}
    for start in sorted(blocks, key=lambda block: block.position):
        run: list[RoutedBlock] = []
        each: RoutedBlock | None = left.pop(start.keys[0], None)
        while each is not None:
            run.append(each)
            child = children.get(each.keys[0])
            each = left.pop(child.keys[0], None) if child else None
        if run:
            yield run


_STORAGE_TIERS = sum(TIER_BIT[tier] for tier in SLOW_TIERS)

_AT_ONCE = 4096
"""Blocks taken in before vLLM's scheduler, which may wait for it, has its turn: some milliseconds.

Where the table of what the daemon has must double, it is 0.15 us for each block there: a tenth of a
second at 660,000, and once.
"""

Describe = Callable[[Any, int, int], Sequence[BlockNames]]
"""Tells of a request what vLLM calls its blocks from one index to before another.

Of fewer, where vLLM has no names for the last of them yet.
"""


class _Stale:
    """Blocks of which something may have changed, by their place in a prompt."""

    def __init__(self) -> None:
        self._by_position: dict[int, dict[BlockHash, RoutedBlock]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_position)

    def add(self, block: RoutedBlock) -> None:
        self._by_position.setdefault(block.position, {})[block.keys[0]] = block

    def discard(self, block: RoutedBlock) -> None:
        blocks = self._by_position.get(block.position, {})
        blocks.pop(block.keys[0], None)
        if not blocks:
            self._by_position.pop(block.position, None)

    def take(self, blocks_max: int) -> list[RoutedBlock]:
        """Take those that are nearest to a root."""
        in_order = (self._by_position[position].values() for position in sorted(self._by_position))
        taken = list(islice(chain.from_iterable(in_order), blocks_max))
        for block in taken:
            self.discard(block)
        return taken


class RouterFeed:
    """See the module. Changes may come from any thread; all else from the scheduler's."""

    def __init__(self, describe: Describe, num_ranks: int = 1, *, blocks_max: int) -> None:
        self._describe = describe
        self._blocks_max = blocks_max
        self._lock = threading.Lock()
        self._residences = [BlockResidency() for _ in range(num_ranks)]
        self._blocks: dict[BlockHash, RoutedBlock] = {}
        """By the first rank's hash; each one's parent is there as well."""
        self._leaves: OrderedDict[BlockHash, RoutedBlock] = OrderedDict()
        """Those without children, the next to be forgotten first."""
        self._forgotten: dict[BlockHash, RoutedBlock] = {}
        """Those that are to be withdrawn."""
        self._firsts: dict[bytes, BlockHash] = {}
        """By the hashes of the other ranks."""
        self._stale = _Stale()

    @property
    def is_waiting(self) -> bool:
        """Tell whether there may be something to take."""
        return bool(self._stale or self._forgotten)

    def hear(self, rank: int = 0) -> OnChanges:
        """Return what takes the changes of a rank's key space in."""
        return partial(self._hear, rank)

    def follow(self, tracked: TrackedRequest) -> None:
        """Remember the blocks that a request has more than when it was last followed."""
        num_blocks = len(tracked.chains)
        if num_blocks > tracked.num_learned:
            chains = tracked.chains.first(num_blocks)
            with self._lock:
                tracked.num_learned = self._learn(tracked.request, chains, tracked.num_learned)

    def take(self, blocks_max: int) -> RouterUpdate:
        """Take what is to be published of so many blocks at most, and of as many forgotten ones.

        The latter cannot pile up: each was announced, and that was no faster.
        """
        told = RouterUpdate()
        if not self.is_waiting:
            return told
        with self._lock:
            for key in list(islice(self._forgotten, blocks_max)):
                block = self._forgotten.pop(key)
                told.withdraw(block, block.media)
            stale = self._stale.take(blocks_max)
            came: dict[int, list[RoutedBlock]] = {medium: [] for medium in MEDIA}
            for block, media in zip(stale, self._media(stale), strict=True):
                stays = 0 if block.is_cleared else block.media & media
                told.withdraw(block, block.media & ~stays)
                for medium in MEDIA:
                    if media & ~stays & medium:
                        came[medium].append(block)
                block.media, block.is_cleared = media, False
        for medium, blocks in came.items():
            told.announced += [(medium, run) for run in runs_of(blocks)]
        return told

    def announce_again(self) -> None:
        """Withdraw and announce all: vLLM has told routers that all of its blocks are gone."""
        with self._lock:
            for block in self._blocks.values():
                if block.media:
                    block.is_cleared = True
                    self._stale.add(block)

    def forget_tiers(self) -> None:
        """Take it that no tier has anything, until told otherwise."""
        for rank in range(len(self._residences)):
            self._start_again(rank)

    def begin_again(self) -> None:
        """Forget every block without a word, so that nothing waits; requests bring them again."""
        with self._lock:
            for known in (self._blocks, self._leaves, self._forgotten, self._firsts):
                known.clear()
            self._stale = _Stale()

    def _learn(self, request: Any, chains: Sequence[Sequence[BlockHash]], first: int) -> int:
        """Remember blocks from ``first`` on as far as vLLM has names for them; return how far."""
        keys, end = chains[0], len(chains[0])
        while first and keys[first - 1] not in self._blocks:  # forgotten since
            first -= 1
        while first < end and keys[first] in self._blocks:
            first += 1
        if first and keys[first - 1] in self._leaves:
            self._leaves.move_to_end(keys[first - 1])
        described = self._describe(request, first, end) if first < end else ()
        for index, facts in enumerate(described, first):
            parent = keys[index - 1] if index else None
            self._remember(
                RoutedBlock(tuple(chain[index] for chain in chains), parent, index, facts)
            )
            if keys[index] not in self._blocks:  # the chain alone is longer than what is remembered
                break
        return first + len(described)

    def _hear(self, rank: int, changes: Sequence[ResidencyChange]) -> None:
        for change in changes:
            if change.tier is None:
                self._start_again(rank)
                continue
            for start in range(0, len(change.keys), _AT_ONCE):
                keys = change.keys[start : start + _AT_ONCE]
                hashes = _hashes(keys)
                if len(set(hashes)) < len(keys):
                    keys = np.unique(keys, axis=0)
                with self._lock:
                    residence = self._residences[rank]
                    residence.note(keys, change.tier, is_there=change.is_there)
                    known = self._firsts if rank else self._blocks
                    for key in (key for key in hashes if key in known):
                        block = self._blocks[self._firsts[key] if rank else BlockHash(key)]
                        self._stale.add(block)

    def _start_again(self, rank: int) -> None:
        with self._lock:
            self._residences[rank].clear()
            for block in self._blocks.values():
                if block.media:
                    self._stale.add(block)

    def _remember(self, block: RoutedBlock) -> None:
        first = block.keys[0]
        block = self._forgotten.pop(first, block)
        self._blocks[first] = self._leaves[first] = block
        self._stale.add(block)
        self._firsts |= dict.fromkeys(block.keys[1:], first)
        if block.parent:
            self._blocks[block.parent].num_children += 1
            self._leaves.pop(block.parent, None)
        if len(self._blocks) > self._blocks_max:
            self._forget(*self._leaves.popitem(last=False))

    def _forget(self, key: BlockHash, block: RoutedBlock) -> None:
        """Forget a leaf; its parent is the next one then, if nothing else hangs on it."""
        del self._blocks[key]
        self._stale.discard(block)
        for each in block.keys[1:]:
            del self._firsts[each]
        if block.media:
            self._forgotten[key] = block
        if block.parent:
            parent = self._blocks[block.parent]
            parent.num_children -= 1
            if not parent.num_children:
                self._leaves[block.parent] = parent
                self._leaves.move_to_end(block.parent, last=False)

    def _media(self, blocks: Sequence[RoutedBlock]) -> list[int]:
        """Return the media in which every rank has each block."""
        media = np.full(len(blocks), CPU | STORAGE, np.uint8)
        for rank, residence in enumerate(self._residences):
            bits = residence.bits(as_keys(b"".join(block.keys[rank] for block in blocks)))
            in_cpu = np.where(bits & TIER_BIT[TierName.CPU], CPU, 0)
            in_storage = np.where(bits & _STORAGE_TIERS, STORAGE, 0)
            media &= (in_cpu | in_storage).astype(np.uint8)
        found: list[int] = media.tolist()
        return found


def _hashes(keys: Keys) -> list[bytes]:
    """Return keys as block hashes, a million in a tenth of a second."""
    hashes: list[bytes] = np.ascontiguousarray(keys).view(f"V{HASH_BYTES}").reshape(-1).tolist()
    return hashes
