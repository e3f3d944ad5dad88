"""Copies between an engine's blocks and arena slots; in host memory with NumPy.

When a call ends, successfully or not, no copy that it started is running: its slots and blocks may
be reused at once.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

from kvtier.connectors.kit.device import CudaDevice, Fence
from kvtier.connectors.kit.device_copies import DeviceCopier
from kvtier.connectors.kit.pages import Pages
from kvtier.transfer.shm import ArenaPin

__all__ = ["BlockCopier", "HostCopier", "open_copies"]


class BlockCopier(Protocol):
    """Copies blocks; several threads may call ``gather`` and ``scatter`` at the same time."""

    num_readers: int
    """How many threads may call ``scatter`` at a time; one more may call ``gather``."""
    block_bytes: int
    """Bytes of one engine block."""

    @property
    def arena(self) -> ArenaPin | None:
        """Return the object that pins the daemon's arena, or None if it need not be pinned."""

    def fence(self) -> Fence:
        """Return the current point in the engine's work; call it on an engine thread."""

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Generator[None]:
        """Fill each slot with engine blocks; yields once per filled slot, in order."""

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """Fill engine blocks from each slot; parts for a negative block id are skipped."""

    def is_staged(self, slot: memoryview) -> bool:
        """Return whether a slot's bytes are copied an extra time on their way."""

    def close(self) -> None:
        """Free the device's memory."""


def open_copies(pages: Pages) -> BlockCopier:
    """Return copies for the device of the pages. Raises ValueError for an unsupported one."""
    if pages.device.type == "cpu":
        return HostCopier(pages)
    if pages.device.type == "cuda":
        return DeviceCopier(pages, CudaDevice(pages.device))
    raise ValueError(f"the engine's blocks are on {pages.device}; supported are CPUs and CUDA")


class _CompletedFence:
    """The fence of synchronous work, which is always complete."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostCopier:
    """Copies block by block with NumPy, which releases the GIL meanwhile."""

    num_readers = 4
    """Threads share the memory bandwidth, and also wait for the daemon."""
    arena = None

    def __init__(self, pages: Pages) -> None:
        self.block_bytes = pages.block_bytes
        self._pages = pages
        self._planes = [(plane, plane.words.numpy()) for plane in pages.planes]

    def fence(self) -> Fence:
        """See ``BlockCopier``."""
        return _CompletedFence()

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Generator[None]:
        """See ``BlockCopier``."""
        for each, slot in zip(blocks, slots, strict=True):
            self._pages.check(each)
            for block, row in zip(each, self._pages.rows(slot, len(each)), strict=True):
                for plane, words in self._planes:
                    part = row[plane.start : plane.end]
                    part.reshape(words.shape[1:])[...] = words[block]
            yield

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """See ``BlockCopier``."""
        for slot, each in zip(slots, blocks, strict=True):
            self._pages.check([block for block in each if block >= 0])
            for block, row in zip(each, self._pages.rows(slot, len(each)), strict=True):
                if block < 0:
                    continue
                for plane, words in self._planes:
                    part = row[plane.start : plane.end]
                    words[block] = part.reshape(words.shape[1:])

    def is_staged(self, slot: memoryview) -> bool:
        """See ``BlockCopier``."""
        return False

    def close(self) -> None:
        """See ``BlockCopier``."""
