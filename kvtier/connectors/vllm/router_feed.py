"""Tracks which blocks enter and leave a medium, for routers that listen to vLLM's KV events.

Theory
------
The daemon identifies blocks by kvtier's hashes, a router by vLLM's. The mapping (vLLM's hashes of a
block, its tokens and its parent) is known while this process remembers a request that had the
block. So a block that another engine stored, or this one before a restart, is announced only once a
request of this engine has had it.

Rules
-----
* A block is announced once per medium and withdrawn once. kvtier blocks that diverge inside share
  some vLLM blocks, and each announces them: routers count references, as vLLM expects.
* A medium has a block only while every rank has it there; otherwise it cannot be loaded.
* Blocks nearest to a root are announced first, even over several takes: some routers drop a block
  whose parent they do not know, and would not be told again.
* The memory is bounded. The least recently used blocks are forgotten, from the end of their chain,
  and withdrawn.
* Several changes of a block between two takes are combined into one, or cancel out.
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
"""Media as bits. SSD and Redis are one medium in vLLM's events."""


@dataclass(frozen=True, slots=True)
class BlockNames:
    """vLLM's hashes of the blocks that make up one kvtier block, and their content."""

    names: tuple[Any, ...]
    parent_name: Any
    token_ids: npt.NDArray[np.uint32]
    extra_keys: tuple[Any, ...] | None = None
    lora: tuple[int, str] | None = None


@dataclass(slots=True)
class RoutedBlock:
    """A kvtier block that a request of this engine had."""

    keys: tuple[BlockHash, ...]
    """The block's hash for each rank."""
    parent: BlockHash | None
    """The parent's hash for the first rank; None at the root."""
    position: int
    facts: BlockNames
    media: int = 0
    """The media in which it is announced, as bits."""
    is_cleared: bool = False
    """Whether vLLM has told routers that it is gone."""
    num_children: int = 0
    """Number of children that are remembered."""


@dataclass(slots=True)
class RouterUpdate:
    """What to publish: first withdrawn blocks, then announced ones."""

    withdrawn: dict[int, list[Any]] = field(default_factory=dict)
    """vLLM's hashes, by medium."""
    announced: list[tuple[int, list[RoutedBlock]]] = field(default_factory=list)
    """Medium and run; each block is the child of the one before it, and parents come first."""

    def withdraw(self, block: RoutedBlock, media: int) -> None:
        """Withdraw a block from media."""
        for medium in MEDIA:
            if media & medium:
                self.withdrawn.setdefault(medium, []).extend(block.facts.names)


def runs_of(blocks: Sequence[RoutedBlock]) -> Iterator[list[RoutedBlock]]:
    """Group blocks into runs of child after parent; a parent's run comes first."""
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
"""Blocks processed before the lock is released to vLLM's scheduler: a few milliseconds.

When the residency table doubles, that takes 0.15 us for each block in it: a tenth of a second at
660,000 blocks, once.
"""

Describe = Callable[[Any, int, int], Sequence[BlockNames]]
"""Returns vLLM's names of a request's blocks, given the first index and the end.

Returns fewer if vLLM has no names for the last ones yet.
"""


class _Stale:
    """Blocks whose state may have changed, by their position in a prompt."""

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
        """Take the blocks nearest to a root."""
        in_order = (self._by_position[position].values() for position in sorted(self._by_position))
        taken = list(islice(chain.from_iterable(in_order), blocks_max))
        for block in taken:
            self.discard(block)
        return taken


class RouterFeed:
    """Collects announcements and withdrawals of blocks for routers.

    Changes may come from any thread; use everything else on the scheduler's thread.
    """

    def __init__(self, describe: Describe, num_ranks: int = 1, *, blocks_max: int) -> None:
        self._describe = describe
        self._blocks_max = blocks_max
        self._lock = threading.Lock()
        self._residencies = [BlockResidency() for _ in range(num_ranks)]
        self._blocks: dict[BlockHash, RoutedBlock] = {}
        """By the first rank's hash; the parent of each is also present."""
        self._leaves: OrderedDict[BlockHash, RoutedBlock] = OrderedDict()
        """Blocks without children, in the order in which they will be forgotten."""
        self._forgotten: dict[BlockHash, RoutedBlock] = {}
        """Blocks to withdraw."""
        self._firsts: dict[bytes, BlockHash] = {}
        """The first rank's hash, by the hashes of the other ranks."""
        self._stale = _Stale()

    @property
    def is_waiting(self) -> bool:
        """Return whether there may be updates to take."""
        return bool(self._stale or self._forgotten)

    def listener(self, rank: int = 0) -> OnChanges:
        """Return the callback for changes of a rank's key space."""
        return partial(self._note_changes, rank)

    def follow(self, tracked: TrackedRequest) -> None:
        """Remember the blocks that a request has gained since the last call."""
        num_blocks = len(tracked.chains)
        if num_blocks > tracked.num_followed:
            chains = tracked.chains.first(num_blocks)
            with self._lock:
                tracked.num_followed = self._learn(tracked.request, chains, tracked.num_followed)

    def take(self, blocks_max: int) -> RouterUpdate:
        """Take the updates of at most ``blocks_max`` blocks, and of as many forgotten ones.

        Forgotten ones cannot pile up, since blocks are not announced any faster.
        """
        update = RouterUpdate()
        if not self.is_waiting:
            return update
        with self._lock:
            for key in list(islice(self._forgotten, blocks_max)):
                block = self._forgotten.pop(key)
                update.withdraw(block, block.media)
            stale = self._stale.take(blocks_max)
            came: dict[int, list[RoutedBlock]] = {medium: [] for medium in MEDIA}
            for block, media in zip(stale, self._media(stale), strict=True):
                stays = 0 if block.is_cleared else block.media & media
                update.withdraw(block, block.media & ~stays)
                for medium in MEDIA:
                    if media & ~stays & medium:
                        came[medium].append(block)
                block.media, block.is_cleared = media, False
        for medium, blocks in came.items():
            update.announced += [(medium, run) for run in runs_of(blocks)]
        return update

    def reannounce(self) -> None:
        """Withdraw and announce all blocks again: vLLM told routers that all are gone."""
        with self._lock:
            for block in self._blocks.values():
                if block.media:
                    block.is_cleared = True
                    self._stale.add(block)

    def clear_residency(self) -> None:
        """Assume that all tiers are empty, until changes say otherwise."""
        for rank in range(len(self._residencies)):
            self._start_again(rank)

    def restart(self) -> None:
        """Forget every block without withdrawing it; requests will add them again."""
        with self._lock:
            for known in (self._blocks, self._leaves, self._forgotten, self._firsts):
                known.clear()
            self._stale = _Stale()

    def _learn(self, request: Any, chains: Sequence[Sequence[BlockHash]], first: int) -> int:
        """Remember blocks from ``first`` on, up to where vLLM has names; returns the end."""
        keys, end = chains[0], len(chains[0])
        while first and keys[first - 1] not in self._blocks:  # forgotten meanwhile
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
            if keys[index] not in self._blocks:  # the chain is longer than the memory
                break
        return first + len(described)

    def _note_changes(self, rank: int, changes: Sequence[ResidencyChange]) -> None:
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
                    residency = self._residencies[rank]
                    residency.note(keys, change.tier, is_there=change.is_there)
                    known = self._firsts if rank else self._blocks
                    for key in (key for key in hashes if key in known):
                        block = self._blocks[self._firsts[key] if rank else BlockHash(key)]
                        self._stale.add(block)

    def _start_again(self, rank: int) -> None:
        with self._lock:
            self._residencies[rank].clear()
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
        """Forget a leaf; its parent becomes the next leaf if it has no other children."""
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
        """Return, for each block, the media in which every rank has it."""
        media = np.full(len(blocks), CPU | STORAGE, np.uint8)
        for rank, residency in enumerate(self._residencies):
            bits = residency.bits(as_keys(b"".join(block.keys[rank] for block in blocks)))
            in_cpu = np.where(bits & TIER_BIT[TierName.CPU], CPU, 0)
            in_storage = np.where(bits & _STORAGE_TIERS, STORAGE, 0)
            media &= (in_cpu | in_storage).astype(np.uint8)
        found: list[int] = media.tolist()
        return found


def _hashes(keys: Keys) -> list[bytes]:
    """Return keys as block hashes; a million take a tenth of a second."""
    hashes: list[bytes] = np.ascontiguousarray(keys).view(f"V{HASH_BYTES}").reshape(-1).tolist()
    return hashes
