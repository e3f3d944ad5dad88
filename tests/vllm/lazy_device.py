"""A device made of host memory that does nothing until it must: the worst that a real one may do.

What is begun on a stream waits there, and is done when somebody waits for a point of it, or looks
long enough. So whoever reads before waiting reads what lay there before; whoever uses a buffer
again too early spoils what is still to be done with it; and what nobody waits for never happens.
The rules of ``Lane`` are assertions.
"""

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import torch

Work = Callable[[], object]
POISON = 0xA5


class Stream:
    """Work in order; ``is_eager`` does each at once, as a device may as well."""

    def __init__(self, is_eager: bool) -> None:
        self.is_eager = is_eager
        self.waiting: deque[Work] = deque()
        self.num_begun = 0
        self._lock = threading.RLock()

    @property
    def num_done(self) -> int:
        with self._lock:
            return self.num_begun - len(self.waiting)

    def begin(self, work: Work) -> None:
        with self._lock:
            self.num_begun += 1
            self.waiting.append(work)
        if self.is_eager:
            self.run(self.num_begun)

    def run(self, until: int) -> None:
        with self._lock:
            while self.num_done < until:
                self.waiting.popleft()()


class Point:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._at = stream, stream.num_begun

    def is_over(self) -> bool:
        """Each look comes a bit later than the one before."""
        is_over = self._stream.num_done >= self._at
        if not is_over:
            self._stream.run(self._stream.num_done + 1)
        return is_over

    def wait(self) -> None:
        self._stream.run(self._at)


class LazyDevice:
    """``is_stuck`` is a device that has hung: looking at it does not help."""

    def __init__(self, *, is_eager: bool = False, memory_bytes: int = 1 << 30) -> None:
        self.is_eager = is_eager
        self.is_stuck = False
        self.compute = Stream(is_eager)
        self.lanes: list[LazyLane] = []
        self.free_bytes = memory_bytes
        self.is_computing = False
        """From then on no memory may be made."""
        self.places: set[int] = set()
        """Of memory on the device."""
        self.host_places: set[int] = set()
        """Of host memory that was made for it."""
        self.known: list[range] = []
        """Addresses of host memory that was registered."""
        self.num_known_most = 1 << 30
        self.num_direct = 0
        """Copies from and to registered memory."""

    @property
    def num_under_way(self) -> int:
        return sum(len(lane.stream.waiting) for lane in self.lanes)

    def take(self, place: int, num_bytes: int) -> None:
        self.free_bytes -= num_bytes
        self.places.add(place)

    def give_back(self, place: int, num_bytes: int) -> None:
        self.free_bytes += num_bytes
        self.places.remove(place)

    def register(self, address: int, num_bytes: int) -> bool:
        assert all(address + num_bytes <= each.start or each.stop <= address for each in self.known)
        if len(self.known) >= self.num_known_most:
            return False
        self.known.append(range(address, address + num_bytes))
        return True

    def unregister(self, address: int) -> None:
        assert not self.num_under_way
        (gone,) = [each for each in self.known if each.start == address]
        self.known.remove(gone)

    def fence(self) -> Point:
        return Stuck() if self.is_stuck else Point(self.compute)

    def lane(self) -> "LazyLane":
        self.lanes.append(LazyLane(self))
        return self.lanes[-1]


class Stuck(Point):
    def __init__(self) -> None:
        pass

    def is_over(self) -> bool:
        return False


class LazyLane:
    def __init__(self, device: LazyDevice) -> None:
        self.device = device
        self.stream = Stream(device.is_eager)
        self.fault: Exception | None = None
        self._is_entered = False

    def __enter__(self) -> Self:
        assert not self._is_entered, "one thread at a time"
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_entered = False

    def empty(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(size) * word.itemsize
        if num_bytes > self.device.free_bytes:
            raise MemoryError(f"{num_bytes} bytes")
        made = self.empty_host(size, word)
        place = made.untyped_storage().data_ptr()
        self.device.take(place, num_bytes)
        weakref.finalize(made, self.device.give_back, place, num_bytes)
        return made

    def empty_host(self, size: Sequence[int], word: torch.dtype) -> torch.Tensor:
        assert not self.device.is_computing, "memory is made at the start"
        made = torch.empty(tuple(size), dtype=word)
        made.view(torch.uint8).fill_(POISON)
        place = made.untyped_storage().data_ptr()
        self.device.host_places.add(place)
        weakref.finalize(made, self.device.host_places.discard, place)
        return made

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._is_there(target) != self._is_there(source), "between host and device"
        self._look_at_host(source if self._is_there(target) else target)
        assert target.is_contiguous()
        assert source.is_contiguous()
        self._begin(lambda: target.copy_(source))

    def gather(self, source: torch.Tensor, index: torch.Tensor, target: torch.Tensor) -> None:
        assert self._is_there(index)
        assert self._is_there(target)
        self._begin(lambda: torch.index_select(source, 0, index, out=target))

    def scatter(self, target: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> None:
        assert self._is_there(index)
        assert self._is_there(source)
        self._begin(lambda: target.index_copy_(0, index, source))

    def mark(self) -> Point:
        return Point(self.stream)

    def _begin(self, work: Work) -> None:
        assert self._is_entered, "work of ours is begun on a lane"
        if self.fault is not None:
            raise self.fault
        self.stream.begin(work)

    def _look_at_host(self, tensor: torch.Tensor) -> None:
        """It was made for the device, or lies whole in a piece that was registered."""
        if tensor.untyped_storage().data_ptr() in self.device.host_places:
            return
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - 1
        assert any(first in each and last in each for each in self.device.known), "not pinned"
        self.device.num_direct += 1

    def _is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.device.places
