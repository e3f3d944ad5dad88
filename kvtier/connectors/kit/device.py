"""Where vLLM's tensors are when they are not in host memory: streams of work, and their ends.

Theory
------
What is begun on a device is done later, in the order of its stream, and beside what other streams
do. So three things are told apart here: vLLM's own stream, of which a *fence* remembers how far it
was when an order came; a *lane*, a stream of ours that one thread at a time begins work on; and a
*mark* in a lane, after which host memory may be read, or a block be called filled.

Rules
-----
* All work of ours is begun on a lane, never on vLLM's stream and never on the default one, which
  would hold up vLLM's.
* Memory of a lane is made with it: what vLLM's own stream has freed may still be in use there.
* Nothing here allocates once vLLM computes: it may be recording its graphs, or out of memory.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import torch

from kvtier.observe.log import Log

__all__ = ["CudaDevice", "Device", "DeviceLane", "Fence", "PinnedArena", "is_reached"]

_PAUSES_S = (0.0002, 0.002)
"""The first and the longest between two looks at a fence: a step takes milliseconds."""


class Fence(Protocol):
    """A point in a stream: what was begun before it is over, or not yet."""

    def is_over(self) -> bool:
        """Tell whether all of it is done."""

    def wait(self) -> None:
        """Wait until all of it is done. What is under way on a device cannot be called back."""


class DeviceLane(Protocol):
    """A stream of its own. Work is begun within ``with lane``, and done when a mark is over."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *fault: Any) -> None: ...

    def empty(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        """Make memory on the device. Raises MemoryError."""

    def empty_host(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        """Make host memory that the device copies from and to by itself. Raises MemoryError."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin a copy between host and device."""

    def gather(self, source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy rows ``source[index]``, all on the device, into ``target``."""

    def scatter(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy ``source`` into rows ``target[index]``, all on the device."""

    def mark(self) -> Fence:
        """Return the point that the lane is at."""


class Device(Protocol):
    """One device."""

    def fence(self) -> Fence:
        """Return the point that vLLM's stream is at; called in a thread of vLLM's own."""

    def lane(self) -> DeviceLane:
        """Make a lane."""

    def register(self, address: int, num_bytes: int) -> bool:
        """Lock host memory in place and make it known to the device; False where that fails."""

    def unregister(self, address: int) -> None:
        """Undo ``register``."""


def is_reached(fence: Fence, timeout_s: float) -> bool:
    """Wait until vLLM's work before a fence is done; False if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    pause_s, longest_s = _PAUSES_S
    while not fence.is_over():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True


class CudaDevice:
    """A GPU of CUDA's, or of ROCm's, which torch calls the same. Thin: no CPU can run it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fence(self) -> Fence:
        """See ``Device``."""
        return _record(torch.cuda.current_stream(self._device))

    def lane(self) -> DeviceLane:
        """See ``Device``."""
        return _CudaLane(self._device)

    def register(self, address: int, num_bytes: int) -> bool:
        """See ``Device``. A refusal stays with the thread, whose last error CUDA remembers."""
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
    # A thread that waits sleeps: vLLM needs the core.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it out
    event.record(stream)
    return _CudaFence(event)


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it out
        self._current = torch.cuda.stream(self._stream)

    def __enter__(self) -> Self:
        # A thread begins on the first GPU of the machine, whichever vLLM's is.
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
        except RuntimeError as error:  # what CUDA says where no more may be locked
            raise MemoryError(str(error)) from error

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def gather(self, source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        torch.index_select(source, 0, index, out=target)

    def scatter(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        target.index_copy_(0, index, source)

    def mark(self) -> Fence:
        return _record(self._stream)


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
