"""Copies in host memory: one for each block, with NumPy, which lets go of the GIL meanwhile."""

from collections.abc import Generator, Sequence

from kvtier.connectors.vllm.transfer.device import Fence
from kvtier.connectors.vllm.transfer.pages import Pages

__all__ = ["HostCopies"]


class _Over:
    """Where nothing is done later than it is begun."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostCopies:
    """See the module."""

    num_readers = 4
    """They share the memory's bandwidth, and wait for the daemon beside that."""
    arena = None

    def __init__(self, pages: Pages) -> None:
        self.block_bytes = pages.block_bytes
        self._pages = pages
        self._planes = [(plane, plane.words.numpy()) for plane in pages.planes]

    def fence(self) -> Fence:
        """See ``Copies``."""
        return _Over()

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Generator[None]:
        """See ``Copies``."""
        for each, slot in zip(blocks, slots, strict=True):
            self._pages.check(each)
            for block, row in zip(each, self._pages.rows(slot, len(each)), strict=True):
                for plane, words in self._planes:
                    part = row[plane.start : plane.end]
                    part.reshape(words.shape[1:])[...] = words[block]
            yield

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """See ``Copies``."""
        for slot, each in zip(slots, blocks, strict=True):
            self._pages.check([block for block in each if block >= 0])
            for block, row in zip(each, self._pages.rows(slot, len(each)), strict=True):
                if block < 0:
                    continue
                for plane, words in self._planes:
                    part = row[plane.start : plane.end]
                    words[block] = part.reshape(words.shape[1:])

    def is_staged(self, slot: memoryview) -> bool:
        """See ``Copies``."""
        return False

    def close(self) -> None:
        """See ``Copies``."""
