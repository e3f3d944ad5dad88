"""Copies to and from a device, by way of stages.

Theory
------
On a device, blocks are gathered into a staging buffer by one kernel or a few, and brought to the
host by one copy; the way back is the same in reverse. There are two stages a thread, so that one is
copied while the other's bytes are taken out. The unit is one of vLLM's blocks, so that a stage is
small however large one of ours is.

Rules
-----
* Memory is made at the start, and none later. Where there is little, stages are smaller.
"""

import queue
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch

from kvtier.connectors.kit.device import Device, DeviceLane, Fence, PinnedArena
from kvtier.connectors.kit.pages import Pages
from kvtier.observe.log import Log

__all__ = ["DeviceCopier"]

_log = Log("kvtier.vllm")

_STAGE_BYTES = 16 << 20
"""A copy of it takes 0.3 ms to 1 ms on the buses of today, which hides what beginning it takes."""

_NUM_STAGES = 2

_NUM_READERS = 2
"""On a device: one of them fills the bus while the other's block is being looked up."""

_NUM_WRITERS = 1


@dataclass(frozen=True, slots=True)
class _Row:
    """One of vLLM's blocks, and where in which slot it belongs."""

    block: int
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in a batch that are neighbours in a slot as well."""

    first: int
    """In the batch."""
    num_rows: int
    slot: int
    place: int

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return its rows of a batch's."""
        return batch[self.first : self.first + self.num_rows]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot as rows of words, one for each of vLLM's blocks."""

    rows: torch.Tensor
    is_pinned: bool
    """Whether the device copies from and to it by itself."""

    def of(self, run: _Run) -> torch.Tensor:
        """Return the rows of a run."""
        return self.rows[run.place : run.place + run.num_rows]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Room for some of vLLM's blocks, on the device and on the host."""

    device: torch.Tensor
    host: torch.Tensor
    index: torch.Tensor
    host_index: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch under way."""

    mark: Fence
    stage: _Stage
    batch: Sequence[_Row]


@dataclass(frozen=True, slots=True)
class _Desk:
    """What one thread works with."""

    lane: DeviceLane
    stages: tuple[_Stage, ...]


class DeviceCopier:
    """See the module."""

    num_readers = _NUM_READERS

    def __init__(self, pages: Pages, device: Device, stage_bytes: int = _STAGE_BYTES) -> None:
        """Make all memory; raises ValueError where the device has none."""
        self.block_bytes = pages.block_bytes
        self._pages = pages
        self.arena: PinnedArena = PinnedArena(device)
        self._device = device
        self._num_rows = max(1, stage_bytes // pages.block_bytes)
        self._desks: queue.SimpleQueue[_Desk] = queue.SimpleQueue()
        for desk in self._furnish():
            self._desks.put(desk)
        num_stages = (_NUM_READERS + _NUM_WRITERS) * _NUM_STAGES
        num_bytes = num_stages * self._num_rows * pages.block_bytes
        _log.info("blocks are staged", device=pages.device, device_bytes=num_bytes)

    def fence(self) -> Fence:
        """See ``BlockCopier``."""
        return self._device.fence()

    def gather(
        self, blocks: Sequence[Sequence[int]], slots: Sequence[memoryview]
    ) -> Generator[None]:
        """See ``BlockCopier``."""
        for each in blocks:
            self._pages.check(each)
        targets = self._slots(slots, blocks)
        flights: deque[_Flight] = deque()
        with self._desk() as desk:
            for batch, stage in self._batches(blocks, desk):
                if len(flights) == _NUM_STAGES:
                    yield from _take_out(flights.popleft(), targets)
                flights.append(self._begin_gather(desk.lane, stage, batch, targets))
            while flights:
                yield from _take_out(flights.popleft(), targets)

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """See ``BlockCopier``."""
        sources = self._slots(slots, blocks)
        flights: deque[_Flight] = deque()
        with self._desk() as desk:
            for batch, stage in self._batches(blocks, desk):
                if len(flights) == _NUM_STAGES:
                    flights.popleft().mark.wait()
                flights.append(self._begin_scatter(desk.lane, stage, batch, sources))

    def is_staged(self, slot: memoryview) -> bool:
        """See ``BlockCopier``."""
        return not self.arena.covers(slot)

    def close(self) -> None:
        """See ``BlockCopier``."""
        while not self._desks.empty():
            self._desks.get_nowait()

    def _slots(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> list[_Slot]:
        return [
            _Slot(torch.from_numpy(self._pages.rows(slot, len(each))), self.arena.covers(slot))
            for slot, each in zip(slots, blocks, strict=True)
        ]

    def _batches(
        self, blocks: Sequence[Sequence[int]], desk: _Desk
    ) -> Iterator[tuple[list[_Row], _Stage]]:
        """Yield as many of vLLM's blocks at a time as a stage holds, and a stage for them."""
        rows = [
            _Row(block, slot, place)
            for slot, each in enumerate(blocks)
            for place, block in enumerate(each)
            if block >= 0
        ]
        self._pages.check([row.block for row in rows])
        for number, start in enumerate(range(0, len(rows), self._num_rows)):
            stage = desk.stages[number % _NUM_STAGES]
            yield rows[start : start + self._num_rows], stage

    def _begin_gather(
        self, lane: DeviceLane, stage: _Stage, batch: Sequence[_Row], targets: Sequence[_Slot]
    ) -> _Flight:
        size = len(batch)
        with torch.inference_mode(), lane:
            index = _put_index(lane, stage, batch)
            for plane in self._pages.planes:
                lane.gather(plane.words, index, plane.of(stage.device[:size]))
            for run in _runs(batch):
                target = targets[run.slot]
                host = target.of(run) if target.is_pinned else run.of(stage.host)
                lane.copy(host, run.of(stage.device))
            return _Flight(lane.mark(), stage, batch)

    def _begin_scatter(
        self, lane: DeviceLane, stage: _Stage, batch: Sequence[_Row], sources: Sequence[_Slot]
    ) -> _Flight:
        size = len(batch)
        with torch.inference_mode(), lane:
            index = _put_index(lane, stage, batch)
            for run in _runs(batch):
                source = sources[run.slot]
                host = source.of(run)
                if not source.is_pinned:
                    _copy(run.of(stage.host), host)
                    host = run.of(stage.host)
                lane.copy(run.of(stage.device), host)
            for plane in self._pages.planes:
                lane.scatter(plane.words, index, plane.of(stage.device[:size]))
            return _Flight(lane.mark(), stage, batch)

    @contextmanager
    def _desk(self) -> Iterator[_Desk]:
        """Lend a desk, of which each thread has one. Nothing is under way on it afterwards."""
        desk = self._desks.get_nowait()
        try:
            yield desk
        finally:
            with desk.lane:
                mark = desk.lane.mark()
            mark.wait()
            self._desks.put(desk)

    def _furnish(self) -> list[_Desk]:
        """Make all desks, with smaller stages where memory is short."""
        while True:
            try:
                return [self._make_desk() for _ in range(_NUM_READERS + _NUM_WRITERS)]
            except MemoryError as error:
                if self._num_rows == 1:
                    raise ValueError(
                        f"{self._pages.device} has no memory left to stage blocks of "
                        f"{self.block_bytes} bytes; lower --gpu-memory-utilization"
                    ) from error
                self._num_rows //= 2

    def _make_desk(self) -> _Desk:
        lane = self._device.lane()
        size = (self._num_rows, self._pages.block_words)
        with lane:
            stages = tuple(
                _Stage(
                    lane.empty(size, self._pages.word),
                    lane.empty_host(size, self._pages.word),
                    lane.empty((self._num_rows,), torch.int64),
                    lane.empty_host((self._num_rows,), torch.int64),
                )
                for _ in range(_NUM_STAGES)
            )
        return _Desk(lane, stages)


def _take_out(flight: _Flight, targets: Sequence[_Slot]) -> Generator[None]:
    """Wait for a batch, copy it from its stage into slots, and yield where a slot is filled."""
    flight.mark.wait()
    for run in _runs(flight.batch):
        target = targets[run.slot]
        if not target.is_pinned:
            _copy(target.of(run), run.of(flight.stage.host))
        if run.place + run.num_rows == len(target.rows):
            yield


def _runs(batch: Sequence[_Row]) -> Iterator[_Run]:
    """Yield a batch in as few runs as it has."""
    for (slot, _), group in groupby(
        enumerate(batch), key=lambda each: (each[1].slot, each[1].place - each[0])
    ):
        rows = list(group)
        yield _Run(rows[0][0], len(rows), slot, rows[0][1].place)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within host memory, by NumPy: torch would share that among threads that vLLM needs."""
    target.numpy()[...] = source.numpy()


def _put_index(lane: DeviceLane, stage: _Stage, batch: Sequence[_Row]) -> torch.Tensor:
    """Begin to bring the numbers of a batch's blocks to the device, and return them there."""
    host_index = stage.host_index[: len(batch)]
    host_index.numpy()[...] = [row.block for row in batch]
    index = stage.index[: len(batch)]
    lane.copy(index, host_index)
    return index
