"""Copies between GPU memory and arena slots, through staging buffers.

Theory
------
One or a few kernels gather blocks into a staging buffer on the device, and one copy brings them to
the host; the way back is the reverse. Each thread has two stages, so that one is transferred while
the other is emptied. The unit is one engine block, so that a stage stays small however large a
kvtier block is.

Rules
-----
* All memory is allocated at the start. If little is free, stages are smaller.
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

_log = Log("kvtier.connector")

_STAGE_BYTES = 16 << 20
"""Copying it takes 0.3 ms to 1 ms on current buses, which hides the cost of starting a copy."""

_NUM_STAGES = 2

_NUM_READERS = 2
"""One of them saturates the bus while the other waits for the daemon."""

_NUM_WRITERS = 1


@dataclass(frozen=True, slots=True)
class _Row:
    """One engine block, and its place in a slot."""

    block: int
    slot: int
    place: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive rows of a batch that are consecutive in a slot as well."""

    first: int
    """Index of the first row in the batch."""
    num_rows: int
    slot: int
    place: int

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows of this run in a batch."""
        return batch[self.first : self.first + self.num_rows]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot as rows of words, one for each engine block."""

    rows: torch.Tensor
    is_pinned: bool
    """Whether the device can copy to and from it directly."""

    def of(self, run: _Run) -> torch.Tensor:
        """Return the rows of a run."""
        return self.rows[run.place : run.place + run.num_rows]


@dataclass(frozen=True, slots=True)
class _Stage:
    """Buffers for some engine blocks, on the device and on the host."""

    device: torch.Tensor
    host: torch.Tensor
    index: torch.Tensor
    host_index: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A batch whose copy is queued."""

    mark: Fence
    stage: _Stage
    batch: Sequence[_Row]


@dataclass(frozen=True, slots=True)
class _Staging:
    """The lane and stages of one thread."""

    lane: DeviceLane
    stages: tuple[_Stage, ...]


class DeviceCopier:
    """Implements ``BlockCopier`` for a ``Device``."""

    num_readers = _NUM_READERS

    def __init__(self, pages: Pages, device: Device, stage_bytes: int = _STAGE_BYTES) -> None:
        """Allocate all memory; raises ValueError if the device has none left."""
        self.block_bytes = pages.block_bytes
        self._pages = pages
        self.arena: PinnedArena = PinnedArena(device)
        self._device = device
        self._num_rows = max(1, stage_bytes // pages.block_bytes)
        self._stagings: queue.SimpleQueue[_Staging] = queue.SimpleQueue()
        for staging in self._make_stagings():
            self._stagings.put(staging)
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
        transfers: deque[_Transfer] = deque()
        with self._staging() as staging:
            for batch, stage in self._batches(blocks, staging):
                if len(transfers) == _NUM_STAGES:
                    yield from _take_out(transfers.popleft(), targets)
                transfers.append(self._begin_gather(staging.lane, stage, batch, targets))
            while transfers:
                yield from _take_out(transfers.popleft(), targets)

    def scatter(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> None:
        """See ``BlockCopier``."""
        sources = self._slots(slots, blocks)
        transfers: deque[_Transfer] = deque()
        with self._staging() as staging:
            for batch, stage in self._batches(blocks, staging):
                if len(transfers) == _NUM_STAGES:
                    transfers.popleft().mark.wait()
                transfers.append(self._begin_scatter(staging.lane, stage, batch, sources))

    def is_staged(self, slot: memoryview) -> bool:
        """See ``BlockCopier``."""
        return not self.arena.covers(slot)

    def close(self) -> None:
        """See ``BlockCopier``."""
        while not self._stagings.empty():
            self._stagings.get_nowait()

    def _slots(self, slots: Sequence[memoryview], blocks: Sequence[Sequence[int]]) -> list[_Slot]:
        return [
            _Slot(torch.from_numpy(self._pages.rows(slot, len(each))), self.arena.covers(slot))
            for slot, each in zip(slots, blocks, strict=True)
        ]

    def _batches(
        self, blocks: Sequence[Sequence[int]], staging: _Staging
    ) -> Iterator[tuple[list[_Row], _Stage]]:
        """Yield as many engine blocks at a time as a stage holds, and the stage for them."""
        rows = [
            _Row(block, slot, place)
            for slot, each in enumerate(blocks)
            for place, block in enumerate(each)
            if block >= 0
        ]
        self._pages.check([row.block for row in rows])
        for number, start in enumerate(range(0, len(rows), self._num_rows)):
            stage = staging.stages[number % _NUM_STAGES]
            yield rows[start : start + self._num_rows], stage

    def _begin_gather(
        self, lane: DeviceLane, stage: _Stage, batch: Sequence[_Row], targets: Sequence[_Slot]
    ) -> _Transfer:
        size = len(batch)
        with torch.inference_mode(), lane:
            index = _put_index(lane, stage, batch)
            for plane in self._pages.planes:
                lane.gather(plane.words, index, plane.of(stage.device[:size]))
            for run in _runs(batch):
                target = targets[run.slot]
                host = target.of(run) if target.is_pinned else run.of(stage.host)
                lane.copy(host, run.of(stage.device))
            return _Transfer(lane.mark(), stage, batch)

    def _begin_scatter(
        self, lane: DeviceLane, stage: _Stage, batch: Sequence[_Row], sources: Sequence[_Slot]
    ) -> _Transfer:
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
            return _Transfer(lane.mark(), stage, batch)

    @contextmanager
    def _staging(self) -> Iterator[_Staging]:
        """Lend one thread's staging; nothing is running on it afterwards."""
        staging = self._stagings.get_nowait()
        try:
            yield staging
        finally:
            with staging.lane:
                mark = staging.lane.mark()
            mark.wait()
            self._stagings.put(staging)

    def _make_stagings(self) -> list[_Staging]:
        """Allocate all stagings, with smaller stages if memory is short."""
        while True:
            try:
                return [self._make_staging() for _ in range(_NUM_READERS + _NUM_WRITERS)]
            except MemoryError as error:
                if self._num_rows == 1:
                    raise ValueError(
                        f"{self._pages.device} has no memory left to stage blocks of "
                        f"{self.block_bytes} bytes; lower --gpu-memory-utilization"
                    ) from error
                self._num_rows //= 2

    def _make_staging(self) -> _Staging:
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
        return _Staging(lane, stages)


def _take_out(transfer: _Transfer, targets: Sequence[_Slot]) -> Generator[None]:
    """Wait for a batch, copy it from its stage into slots, and yield once per filled slot."""
    transfer.mark.wait()
    for run in _runs(transfer.batch):
        target = targets[run.slot]
        if not target.is_pinned:
            _copy(target.of(run), run.of(transfer.stage.host))
        if run.place + run.num_rows == len(target.rows):
            yield


def _runs(batch: Sequence[_Row]) -> Iterator[_Run]:
    """Split a batch into as few runs as possible."""
    for (slot, _), group in groupby(
        enumerate(batch), key=lambda each: (each[1].slot, each[1].place - each[0])
    ):
        rows = list(group)
        yield _Run(rows[0][0], len(rows), slot, rows[0][1].place)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy within host memory with NumPy: torch would use threads that the engine needs."""
    target.numpy()[...] = source.numpy()


def _put_index(lane: DeviceLane, stage: _Stage, batch: Sequence[_Row]) -> torch.Tensor:
    """Queue the copy of a batch's block numbers to the device; returns them there."""
    host_index = stage.host_index[: len(batch)]
    host_index.numpy()[...] = [row.block for row in batch]
    index = stage.index[: len(batch)]
    lane.copy(index, host_index)
    return index
