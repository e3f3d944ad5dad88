"""Copies between vLLM's blocks and slots of the arena.

When a call ends, well or badly, nothing it began is under way any more: its slots and blocks are
others' from then on.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

from kvtier.connectors.kit.device import CudaDevice, Fence
from kvtier.connectors.kit.device_copies import DeviceCopier
from kvtier.connectors.kit.pages import Pages
from kvtier.transfer.shm import ArenaPin

__all__ = ["BlockCopier", "HostCopier", "open_copies"]


class BlockCopier(Protocol):
    """Moves blocks; several threads may call ``gather`` and ``scatter`` at a time."""

    num_readers: int
    """How many threads may call ``scatter`` at a time; one may call ``gather`` beside them."""
    block_bytes: int
    """Of one of vLLM's blocks."""

    @property
    def arena(self) -> ArenaPin | None:
        """Return who the daemon's arena must be shown to, if anybody."""

    def fence(self) -> Fence:
        """Return the point that vLLM has come to; called in a thread of vLLM's own."""

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Generator[None]:
        """Fill each slot with blocks of vLLM, and yield when it is filled, one after the other."""

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """Fill blocks of vLLM from each slot; what is meant for a negative one is left out."""

    def is_staged(self, slot: memoryview) -> bool:
        """Tell whether a slot's bytes are copied once more on their way to or from the device."""

    def close(self) -> None:
        """Let go of the device's memory."""


def open_copies(pages: Pages) -> BlockCopier:
    """Return copies for the device of the pages. Raises ValueError where there are none."""
    if pages.device.type == "cpu":
        return HostCopier(pages)
    if pages.device.type == "cuda":
        return DeviceCopier(pages, CudaDevice(pages.device))
    raise ValueError(f"vLLM's blocks are on {pages.device}; CPUs and CUDA devices are served")


class _Over:
    """Where nothing is done later than it is begun."""

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class HostCopier:
    """See the module."""

    num_readers = 4
    """They share the memory's bandwidth, and wait for the daemon beside that."""
    arena = None

    def __init__(self, pages: Pages) -> None:
        self.block_bytes = pages.block_bytes
        self._pages = pages
        self._planes = [(plane, plane.words.numpy()) for plane in pages.planes]

    def fence(self) -> Fence:
        """See ``BlockCopier``."""
        return _Over()

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
