"""Copies between vLLM's blocks and slots of the arena.

When a call ends, well or badly, nothing it began is under way any more: its slots and blocks are
others' from then on.
"""

from collections.abc import Generator, Sequence
from typing import Protocol

from kvtier.connectors.vllm.transfer.device import CudaDevice, Fence
from kvtier.connectors.vllm.transfer.device_copies import DeviceCopies
from kvtier.connectors.vllm.transfer.host_copies import HostCopies
from kvtier.connectors.vllm.transfer.pages import Pages
from kvtier.transfer.shm import ArenaPin

__all__ = ["Copies", "open_copies"]


class Copies(Protocol):
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


def open_copies(pages: Pages) -> Copies:
    """Return copies for the device of the pages. Raises ValueError where there are none."""
    if pages.device.type == "cpu":
        return HostCopies(pages)
    if pages.device.type == "cuda":
        return DeviceCopies(pages, CudaDevice(pages.device))
    raise ValueError(f"vLLM's blocks are on {pages.device}; CPUs and CUDA devices are served")
