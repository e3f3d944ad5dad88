"""Devices other than host memory: streams of work, fences, and pinned host memory.

Theory
------
Work that is queued on a device runs later, in the order of its stream, concurrently with other
streams. There are three concepts: a *fence* is a point in the engine's own stream, taken when a job
arrives; a *lane* is a stream of the connector that one thread at a time queues work on; a *mark* is
a point in a lane, after which host memory may be read, or a block counts as filled.

Rules
-----
* The connector queues work only on lanes: never on the engine's stream, and never on the default
  stream, which would block the engine's.
* A lane's memory is allocated on the lane: memory freed by the engine's stream may still be in use
  there.
* Nothing is allocated once the engine computes: it may be recording its graphs, or be out of
  memory.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch

from kvtier.observe.log import Log

__all__ = ["CudaDevice", "Device", "DeviceLane", "Fence", "PinnedArena", "is_reached"]

_PAUSES_S = (0.0002, 0.002)
"""First and longest pause between two polls of a fence: a step takes milliseconds."""


class Fence(Protocol):
    """A point in a stream, which is reached when the work queued before it is complete."""

    def is_over(self) -> bool:
        """Return whether that work is complete."""

    def wait(self) -> None:
        """Wait until that work is complete. Work on a device cannot be cancelled."""


class DeviceLane(Protocol):
    """A separate stream. Queue work within ``with lane``; it is complete once a mark is over."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *fault: Any) -> None: ...

    def empty(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        """Allocate memory on the device. Raises MemoryError."""

    def empty_host(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory. Raises MemoryError."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device."""

    def gather(self, source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        """Queue a copy of rows ``source[index]`` into ``target``, all on the device."""

    def scatter(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of ``source`` into rows ``target[index]``, all on the device."""

    def mark(self) -> Fence:
        """Return the lane's current point."""


class Device(Protocol):
    """A device that holds KV tensors: its streams and its pinned memory."""

    def fence(self) -> Fence:
        """Return the current point of the engine's stream; call it on an engine thread."""

    def lane(self) -> DeviceLane:
        """Create a lane."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Pin host memory and register it with the device; returns False if that fails."""

    def unregister(self, address: int) -> None:
        """Undo ``register``."""


def is_reached(fence: Fence, timeout_s: float) -> bool:
    """Wait until the work before a fence is complete; False if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    pause_s, longest_s = _PAUSES_S
    while not fence.is_over():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


class CudaDevice:
    """A CUDA or ROCm GPU; torch calls both cuda. Kept thin, since it cannot run on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fence(self) -> Fence:
        """See ``Device``."""
        return _record(torch.cuda.current_stream(self._device))

    def lane(self) -> DeviceLane:
        """See ``Device``."""
        return _CudaLane(self._device)

    def register(self, address: int, num_bytes: int) -> bool:
        """See ``Device``. CUDA remembers a failure as the thread's last error."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it out
        return bool(runtime.cudaHostRegister(address, num_bytes, 0) == runtime.cudaError.success)

    def unregister(self, address: int) -> None:
        """See ``Device``."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it out
        runtime.cudaHostUnregister(address)


class _CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # torch leaves it out

    def wait(self) -> None:
        self._event.synchronize()


def _record(stream: torch.cuda.Stream) -> Fence:
    # Waiting threads sleep: the engine needs the core.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it out
    event.record(stream)
    return _CudaFence(event)


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it out
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self) -> Self:
        # A thread starts on the machine's first GPU, whichever the engine uses.
        torch.cuda.set_device(self._stream.device)
        self._current.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it out
        return self

    def __exit__(self, *fault: Any) -> None:
        self._current.__exit__(*fault)

    def empty(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=word, device=self._stream.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def empty_host(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(size, dtype=word, pin_memory=True)
        except RuntimeError as error:  # CUDA's error when no more memory can be locked
            raise MemoryError(str(error)) from error

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def gather(self, source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        torch.index_select(source, 0, index, out=target)

    def scatter(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        target.index_copy_(0, index, source)

    def mark(self) -> Fence:
        return _record(self._stream)


_log = Log("kvtier.connector")

_PIECE_BYTES = 256 << 20
"""Registering it takes about 25 ms and blocks other driver calls, including the engine's."""


class PinnedArena:
    """An ``ArenaPin`` for one device. Arenas come and go with their daemons.

    A device copies fast only to and from memory that is pinned and registered with it. The arena is
    registered in pieces, on a thread of the client, while blocks are already served; where it is
    not registered yet, copies go through a pinned buffer. A failure is logged and final.
    """

    def __init__(self, device: Device, piece_bytes: int = _PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._pieces: tuple[range, ...] = ()
        """Registered address ranges. Replaced as a whole, since copies read it concurrently."""

    def covers(self, slot: memoryview) -> bool:
        """Return whether a slot lies within one piece: a copy must not cross into another."""
        first = _address(slot)
        last = first + len(slot) - 1
        return any(first in piece and last in piece for piece in self._pieces)

    def pin(self, arena: memoryview, is_over: Callable[[], bool]) -> None:
        """Register an arena, with a pause after each piece as long as the piece took."""
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
        """Unregister an arena before it is unmapped. No copy may be running."""
        whole = range(_address(arena), _address(arena) + len(arena))
        gone = [piece for piece in self._pieces if piece.start in whole]
        self._pieces = tuple(piece for piece in self._pieces if piece not in gone)
        for piece in gone:
            self._device.unregister(piece.start)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
