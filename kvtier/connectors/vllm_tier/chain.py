"""A request's chunks, by vLLM's names and as a chain of kvtier's blocks.

vLLM's name for a chunk is a hash of all tokens up to its end. kvtier's hash is derived from that
and from the previous hash, down to the key space's root. So a hash determines its block's position
in a prompt, and a name at a wrong position yields another hash, not a block with two positions.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from kvtier.core.identity import HASH_BYTES, BlockHash

__all__ = ["ChunkChain", "ChunkRun"]


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Consecutive blocks of a chain, with their chunks of vLLM's memory."""

    first: int
    names: Sequence[bytes]
    chunks: Sequence[int]


class ChunkChain:
    """The chain of a request's chunks; grows at its end only."""

    def __init__(self, root: BlockHash) -> None:
        self.hashes: list[BlockHash] = []
        self._root = root
        self._places: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.hashes)

    def learn(self, names: Collection[bytes]) -> None:
        """Append the new names among all of a request's, if these begin with the known ones."""
        if self.hashes and (len(names) < len(self) or self.place(next(iter(names))) != 0):
            return
        self.extend(islice(names, len(self), None))

    def extend(self, names: Iterable[bytes]) -> None:
        """Append the next names; stops at a name that is known already."""
        parent = self.hashes[-1] if self.hashes else self._root
        for name in names:
            if name in self._places:
                return
            self._places[name] = len(self)
            content = b"kvtier.vllm_chunk\0" + parent + name
            parent = BlockHash(hashlib.sha256(content).digest()[:HASH_BYTES])
            self.hashes.append(parent)

    def place(self, name: bytes) -> int | None:
        """Return a name's position; None if it is unknown."""
        return self._places.get(name)

    def runs(self, chunks: Iterable[tuple[bytes, int]]) -> list[ChunkRun]:
        """Sort named chunks into runs without gaps; unknown names are left out."""
        placed = sorted(
            (place, name, chunk)
            for name, chunk in chunks
            if (place := self.place(name)) is not None
        )
        runs: list[ChunkRun] = []
        start = 0
        for end in range(1, len(placed) + 1):
            if end < len(placed) and placed[end][0] == placed[end - 1][0] + 1:
                continue
            part = placed[start:end]
            runs.append(
                ChunkRun(part[0][0], [each[1] for each in part], [each[2] for each in part])
            )
            start = end
        return runs
