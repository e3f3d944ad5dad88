"""Tracks how many blocks of each key space each tier holds.

The counts are updated with every change: counting a million blocks on each status request, once a
second, would block the node for a tenth of a second each time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.residency import LOWER_TIERS

__all__ = ["BlockTotals", "KeySpaceUsage"]

_SCOPES_MIN = 64


@dataclass(frozen=True, slots=True)
class BlockTotals:
    """A number of blocks, and the bytes of their payloads."""

    num_blocks: int = 0
    num_bytes: int = 0


class KeySpaceUsage:
    """Block counts by key space and tier. Scopes are the numbers that the index assigns."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        """Column of each key space in ``_ready``."""
        self._free: list[int] = []
        self._space: npt.NDArray[np.int64] = np.zeros(_SCOPES_MIN, dtype=np.int64)
        """Column of each scope's key space, by scope."""
        self._block_bytes: list[int] = []
        self._ready: npt.NDArray[np.int64] = np.zeros((len(LOWER_TIERS), 1), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def add_scope(self, scope: int, key_space: bytes) -> None:
        """Record the key space of a scope; its number may have belonged to another one."""
        if scope >= len(self._space):
            self._space = np.concatenate([self._space, np.zeros_like(self._space)])
        number = self._numbers.get(key_space)
        if number is None:
            number = self._numbers[key_space] = self._place()
        self._space[scope] = number

    def note_size(self, scope: int, payload_bytes: int) -> None:
        """Record the block size of a scope's key space; all its blocks have the same size."""
        self._block_bytes[self._space[scope]] = payload_bytes

    def note_change(
        self,
        scopes: npt.NDArray[np.uint32],
        tier: int,
        was_ready: npt.NDArray[np.bool_],
        *,
        is_ready: bool,
    ) -> None:
        """Count one or more blocks whose state in a tier was set."""
        spaces = self._space[scopes]
        first = spaces[0]
        if np.count_nonzero(spaces == first) == len(spaces):  # the common case, and twice as fast
            self._ready[tier, first] += len(spaces) * is_ready - np.count_nonzero(was_ready)
        else:
            np.add.at(self._ready[tier], spaces, int(is_ready) - was_ready.astype(np.int64))

    def has_blocks(self, key_space: bytes) -> bool:
        """Return whether any tier has a ready block of a key space."""
        number = self._numbers.get(key_space)
        return number is not None and bool(self._ready[:, number].any())

    def totals(self, tier: int) -> Iterator[tuple[bytes, BlockTotals]]:
        """Yield each key space that has blocks in a tier, with their totals."""
        num_ready = self._ready[tier].tolist()
        for key_space, number in self._numbers.items():
            if num_ready[number]:
                count = num_ready[number]
                yield key_space, BlockTotals(count, count * self._block_bytes[number])

    def keep_only(self, key_spaces: Iterable[bytes]) -> None:
        """Forget all other key spaces, which have no scope and therefore no block."""
        for key_space in self._numbers.keys() - set(key_spaces):
            self._free.append(self._numbers.pop(key_space))

    def _place(self) -> int:
        if self._free:
            return self._free.pop()
        self._block_bytes.append(0)
        if len(self._block_bytes) > self._ready.shape[1]:
            self._ready = np.concatenate([self._ready, np.zeros_like(self._ready)], axis=1)
        return len(self._block_bytes) - 1
