"""The daemon's arena as memory that a device reads and writes by itself, as far as it takes it.

A device copies fast only between itself and memory that is locked in place and known to it. The
arena is made known in pieces, on a thread of the client's, while blocks are served already: where
it is not known yet, or where the device refuses, a copy goes through a buffer that is. What the
device refuses it refuses for good, and the log says so.
"""

import ctypes
import time
from collections.abc import Callable

from kvtier.connectors.vllm.transfer.device import Device
from kvtier.observe.log import Log

__all__ = ["PinnedArena"]

_log = Log("kvtier.vllm")

_PIECE_BYTES = 256 << 20
"""Takes 25 ms or so, in which other calls to the device's driver wait: vLLM's as well."""


class PinnedArena:
    """See ``kvtier.transfer.shm.Pin``. Arenas come and go with their daemons."""

    def __init__(self, device: Device, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._pieces: tuple[range, ...] = ()
        """Of addresses. Replaced as a whole: copies look into it meanwhile."""

    def covers(self, slot: memoryview) -> bool:
        """Tell whether a slot lies within one piece: a copy must not cross into another."""
        first = _address(slot)
        last = first + len(slot) - 1
        return any(first in piece and last in piece for piece in self._pieces)

    def pin(self, arena: memoryview, is_over: Callable[[], bool]) -> None:
        """Make an arena known, with a pause after each piece as long as it took."""
        start, end = _address(arena), _address(arena) + len(arena)
        began_s = time.monotonic()
        for first in range(start, end, self._piece_bytes):
            piece = range(first, min(first + self._piece_bytes, end))
            piece_began_s = time.monotonic()
            if is_over():
                return
            if not self._device.register(piece.start, len(piece)):
                event = "the device does not take the arena: blocks are copied twice"
                _log.warning(event, known_bytes=first - start, arena_bytes=len(arena))
                return
            self._pieces = (*self._pieces, piece)
            time.sleep(time.monotonic() - piece_began_s)
        took_s = round(time.monotonic() - began_s, 1)
        _log.info("the device knows the arena", arena_bytes=len(arena), seconds=took_s)

    def unpin(self, arena: memoryview) -> None:
        """Have an arena forgotten, before it is unmapped. No copy may be under way."""
        whole = range(_address(arena), _address(arena) + len(arena))
        gone = [piece for piece in self._pieces if piece.start in whole]
        self._pieces = tuple(piece for piece in self._pieces if piece not in gone)
        for piece in gone:
            self._device.unregister(piece.start)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
