"""A block as routers know it, and what they are told of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import BlockHash

__all__ = ["CPU", "MEDIA", "STORAGE", "Block", "Facts", "Told", "runs_of"]

CPU, STORAGE = 1, 2
MEDIA = (CPU, STORAGE)
"""As bits: SSD and Redis are one medium in vLLM's events."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What vLLM calls the blocks of its own that make one of ours, and what they are of."""

    names: tuple[Any, ...]
    parent_name: Any
    token_ids: npt.NDArray[np.uint32]
    extra_keys: tuple[Any, ...] | None = None
    lora: tuple[int, str] | None = None


@dataclass(slots=True)
class Block:
    """One of our blocks that a request of this engine had."""

    keys: tuple[BlockHash, ...]
    """One for each rank."""
    parent: BlockHash | None
    """Of the first rank; None at the root."""
    position: int
    facts: Facts
    media: int = 0
    """In which it is announced."""
    is_cleared: bool = False
    """vLLM has said that it is gone."""
    num_children: int = 0
    """That are remembered."""


@dataclass(slots=True)
class Told:
    """What is to be published: first what was withdrawn, by medium, then what came."""

    withdrawn: dict[int, list[Any]] = field(default_factory=dict)
    """Names of vLLM's."""
    announced: list[tuple[int, list[Block]]] = field(default_factory=list)
    """Runs of one medium, each block the child of the one before it; parents come first."""

    def withdraw(self, block: Block, media: int) -> None:
        """Add a block to what was withdrawn from media."""
        for medium in MEDIA:
            if media & medium:
                self.withdrawn.setdefault(medium, []).extend(block.facts.names)


def runs_of(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Yield blocks as runs of child after parent; no run comes before that of its parent."""
    left = {block.keys[0]: block for block in blocks}
    children = {block.parent: block for block in blocks if block.parent}
    for start in sorted(blocks, key=lambda block: block.position):
        run: list[Block] = []
        each: Block | None = left.pop(start.keys[0], None)
        while each is not None:
            run.append(each)
            child = children.get(each.keys[0])
            each = left.pop(child.keys[0], None) if child else None
        if run:
            yield run
