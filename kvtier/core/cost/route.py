"""Models how long a restore takes: the reads of a tier, and the copy from the arena to the engine.

Theory
------
One transfer takes ``t0 + blocks * per_block + bytes * (per_byte + (depth - 1) * per_byte_more)``.
If concurrent transfers share a device, ``per_byte_more`` is fitted close to ``per_byte``; if they
do not slow each other down, close to zero. A restore is divided into transfers; a tier runs
several at a time, after those already queued.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from kvtier.core.cost.fit import Fit, Rate, number, table
from kvtier.core.limits import TRANSFER_BLOCKS, TRANSFER_BLOCKS_MAX, TRANSFER_BYTES
from kvtier.core.plan import TransferSample
from kvtier.core.tier_registry import LOWER_TIERS, TIERS, TierName

__all__ = ["RouteCost", "RouteCosts", "RouteSpeed", "transfer_blocks"]

_MIB = 1 << 20

_FIRST_TAIL = 3.0
"""Ratio of P95 to mean for a tier without measurements: wide."""

_ABOUT = 0.9
"""Share of the expected duration: a transfer that took at least this long confirms the model, even
if unfinished."""

_DEPTH_MAX = 64
"""Concurrent transfers: no tier has more threads."""

_PARTS = 16
"""About how many transfers a load from the back is divided into: where front and back meet, one of
them is wasted."""

_START_SHARE = 0.1
"""Largest share of a transfer that its fixed start time may take because of that."""

_USUAL = (1.0, 8.0, 8.0 * _MIB, 0.0)
"""The reference transfer for comparing speeds: eight blocks of 1 MiB, alone."""


def transfer_blocks(block_bytes: int) -> int:
    """Return how many blocks of a size the node puts into one transfer."""
    return max(TRANSFER_BLOCKS, min(TRANSFER_BLOCKS_MAX, TRANSFER_BYTES // max(block_bytes, 1)))


@dataclass(frozen=True, slots=True)
class RouteSpeed:
    """How a route moves blocks of one size, computed once for many predictions.

    A few blocks are one transfer. More are several concurrent transfers, up to the route's depth;
    beyond it each further transfer takes as long as the route needs for it.
    """

    start_s: float
    block_s: float
    """Seconds per block of a single transfer."""
    part_blocks: int
    """Blocks per transfer."""
    depth: int
    contention_s: float
    """Seconds by which each concurrent transfer delays a full one."""
    lag: float
    """Ratio of a whole restore's time to the sum of its transfers; included in the other values."""
    tail: float
    """Ratio of P95 to mean, for one transfer."""
    tail_whole: float
    """Lower bound of that ratio for whole restores."""

    def seconds(self, num_blocks: float) -> float:
        """Return how long this many blocks take; more blocks never take less."""
        if num_blocks <= 0:
            return 0.0
        full = num_blocks / self.part_blocks
        if full <= 1:
            return self.start_s + num_blocks * self.block_s
        flying = min(full, self.depth)
        one = self.start_s + self.part_blocks * self.block_s + (flying - 1) * self.contention_s
        return max(full / flying, 1.0) * one

    def in_parts(self, num_blocks: int) -> "RouteSpeed":
        """Return the same route with smaller transfers, for a load from the back."""
        least = ceil(self.start_s / (_START_SHARE * self.block_s))
        part = min(max(num_blocks // _PARTS, least, 1), self.part_blocks)
        return replace(
            self, part_blocks=part, contention_s=self.contention_s * part / self.part_blocks
        )

    def queue_s(self, num_blocks: float) -> float:
        """Return how long this many queued blocks delay others."""
        flying = self.depth
        one = self.start_s + self.part_blocks * self.block_s + (flying - 1) * self.contention_s
        return num_blocks / self.part_blocks / flying * one

    def tail_of(self, num_blocks: float) -> float:
        """Return the ratio of P95 to mean: the noise of sequential transfers averages out."""
        rounds = max(num_blocks / self.part_blocks / self.depth, 1.0)
        return float(max(1.0 + (self.tail - 1.0) / rounds**0.5, self.tail_whole))


class RouteCost:
    """The transfer model of one tier in one direction."""

    def __init__(self, tier: TierName) -> None:
        prior = TIERS[tier].prior
        assert prior is not None, f"{tier} has a prior"
        self._tier = tier
        self._fit = Fit(
            (
                Rate(prior.start_s, 0.0, 60.0),
                Rate(prior.block_s, 0.0, 10.0),
                Rate(1 / prior.bytes_per_s, 1e-13, 1e-3),
                Rate(0.5 / prior.bytes_per_s, 0.0, 1e-3),
            ),
            _FIRST_TAIL,
        )
        # Threads that wait for each other or for the engine: visible in whole restores only.
        self._whole = Fit((Rate(1.0, 0.8, 4.0),), 1.0)
        self._depths: deque[int] = deque((1,), maxlen=64)
        self._is_recalled = False

    @property
    def is_known(self) -> bool:
        """Return whether it was measured, in this run or an earlier one."""
        return self._is_recalled or self._fit.num_noted > 0

    def note(self, sample: TransferSample, now_ns: int) -> bool:
        """Learn from a transfer; returns False if it is invalid."""
        is_one = sample.num_blocks >= 1 and sample.num_bytes >= 1 and sample.depth >= 1
        if not is_one or not self._fit.note(_terms(sample), sample.seconds, now_ns):
            return False
        self._depths.append(min(sample.depth, _DEPTH_MAX))
        return True

    def is_slow(self, sample: TransferSample) -> bool:
        """Return whether a transfer took about as long as expected, or longer."""
        return sample.seconds > _ABOUT * self._fit.mean_s(_terms(sample))

    def note_whole(self, predicted_s: float, seconds: float, now_ns: int) -> None:
        """Learn from a whole restore, and the prediction for its transfers."""
        self._whole.note((predicted_s,), seconds, now_ns)

    def is_stale(self, now_ns: int, after_ns: int) -> bool:
        """Return whether the last measurement is at least this old."""
        noted_ns = self._fit.noted_ns
        return noted_ns is None or abs(now_ns - noted_ns) >= after_ns

    @property
    def looks_faster(self) -> bool:
        """Return whether the last measurement was far below the prediction."""
        return self._fit.looks_faster

    def speed(self, block_bytes: int) -> RouteSpeed:
        """Return the speed for blocks of a size, as far as it is known."""
        start_s, per_block, per_byte, per_byte_more = self._fit.rates
        lag = self._whole.rates[0]
        # The engine copies blocks as they arrive, in one go; a tier is read in parts.
        is_cut = self._tier is not TierName.CPU
        part = transfer_blocks(block_bytes) if is_cut else 1 << 30
        return RouteSpeed(
            start_s=start_s * lag,
            block_s=max(per_block + block_bytes * per_byte, 1e-9) * lag,
            part_blocks=part,
            depth=max(self._depths) if is_cut else 1,
            contention_s=part * block_bytes * per_byte_more * lag if is_cut else 0.0,
            lag=lag,
            tail=self._fit.tail,
            tail_whole=self._whole.tail,
        )

    def bytes_per_s(self) -> float:
        """Return the bandwidth of a single transfer of the usual size."""
        return 8 * _MIB / self._fit.mean_s(_USUAL)

    def document(self) -> dict[str, Any]:
        """Return the learned state and the resulting bandwidth."""
        return {
            **self._fit.document(),
            "depth": max(self._depths),
            "bytes_per_s": self.bytes_per_s(),
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the learned state of an earlier run; raises ValueError if it is invalid."""
        depth = int(number(document.get("depth"), 1, _DEPTH_MAX))
        self._fit.recall(document)
        self._depths.append(depth)
        self._is_recalled = True


def _terms(sample: TransferSample) -> tuple[float, float, float, float]:
    num_bytes, depth = sample.num_bytes, min(sample.depth, _DEPTH_MAX)
    return 1.0, sample.num_blocks, num_bytes, num_bytes * (depth - 1)


class RouteCosts:
    """The routes of all tiers, in both directions."""

    def __init__(self) -> None:
        self._routes = {
            (tier, is_read): RouteCost(tier) for tier in LOWER_TIERS for is_read in (True, False)
        }

    def route(self, tier: TierName, *, is_read: bool = True) -> RouteCost:
        """Return a tier's route; the CPU tier's is the copy into the engine."""
        return self._routes[tier, is_read]

    def document(self) -> dict[str, Any]:
        """Return the learned state, by tier and direction; only measured routes."""
        return {
            f"{tier}_{'read' if is_read else 'write'}": route.document()
            for (tier, is_read), route in self._routes.items()
            if route.is_known
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the learned state of an earlier run; raises ValueError if it is invalid."""
        for (tier, is_read), route in self._routes.items():
            if part := table(document, f"{tier}_{'read' if is_read else 'write'}"):
                route.recall(part)
