"""What a restore takes: reads of a tier, and the way from the arena into the engine.

Theory
------
One transfer takes ``t0 + blocks * per_block + bytes * (per_byte + (depth - 1) * per_byte_more)``:
where transfers that fly together share a medium, ``per_byte_more`` comes out like ``per_byte``;
where they do not get into each other's way it comes out as nothing. A restore is cut into transfers
of which a tier carries out some at a time, after those that wait already.
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
"""P95 over mean of a tier that nobody measured yet: wide."""

_ABOUT = 0.9
"""Of what is expected: what took so long at least is no sign of speed, and shows that all is as it
was."""

_DEPTH_MAX = 64
"""Transfers that fly together: more threads no tier has."""

_PARTS = 16
"""A load from the back comes in about so many transfers: where front and back meet, one of them is
under way in vain."""

_START_SHARE = 0.1
"""Yet they are not cut so small that they begin for a greater part of their time."""

_USUAL = (1.0, 8.0, 8.0 * _MIB, 0.0)
"""A transfer by which speeds are compared: eight blocks of 1 MiB, alone."""


def transfer_blocks(block_bytes: int) -> int:
    """Return how many blocks of a size one transfer carries, as the node cuts them."""
    return max(TRANSFER_BLOCKS, min(TRANSFER_BLOCKS_MAX, TRANSFER_BYTES // max(block_bytes, 1)))


@dataclass(frozen=True, slots=True)
class RouteSpeed:
    """How a route moves blocks of one size, worked out once for many questions.

    A few blocks are one transfer. More are several at a time, as many as the route carries at once;
    beyond that each takes as long as the route needs to pass it.
    """

    start_s: float
    block_s: float
    """Of a transfer that flies alone."""
    part_blocks: int
    """Of one transfer."""
    depth: int
    crowd_s: float
    """By which each further one that flies lengthens a full transfer."""
    lag: float
    """Whole restores over what their transfers should take together; it is in the others."""
    tail: float
    """P95 over mean, of one transfer."""
    tail_whole: float
    """And of whole restores, at the least."""

    def seconds(self, num_blocks: float) -> float:
        """Return how long so many blocks take; more blocks never take less."""
        if num_blocks <= 0:
            return 0.0
        full = num_blocks / self.part_blocks
        if full <= 1:
            return self.start_s + num_blocks * self.block_s
        flying = min(full, self.depth)
        one = self.start_s + self.part_blocks * self.block_s + (flying - 1) * self.crowd_s
        return max(full / flying, 1.0) * one

    def in_parts(self, num_blocks: int) -> "RouteSpeed":
        """Return the same route with transfers cut so small that so many blocks come in parts."""
        least = ceil(self.start_s / (_START_SHARE * self.block_s))
        part = min(max(num_blocks // _PARTS, least, 1), self.part_blocks)
        return replace(self, part_blocks=part, crowd_s=self.crowd_s * part / self.part_blocks)

    def passing_s(self, num_blocks: float) -> float:
        """Return how long so many blocks that wait before others hold them up."""
        flying = self.depth
        one = self.start_s + self.part_blocks * self.block_s + (flying - 1) * self.crowd_s
        return num_blocks / self.part_blocks / flying * one

    def tail_of(self, num_blocks: float) -> float:
        """Return P95 over mean; the noise of transfers one after the other evens out."""
        rounds = max(num_blocks / self.part_blocks / self.depth, 1.0)
        return float(max(1.0 + (self.tail - 1.0) / rounds**0.5, self.tail_whole))


class RouteCost:
    """The transfers of one tier in one direction."""

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
        # Threads that wait for each other, or for the engine to take notice: it shows in whole
        # restores only.
        self._whole = Fit((Rate(1.0, 0.8, 4.0),), 1.0)
        self._depths: deque[int] = deque((1,), maxlen=64)
        self._is_recalled = False

    @property
    def is_known(self) -> bool:
        """Tell whether it was measured, now or in an earlier run."""
        return self._is_recalled or self._fit.num_noted > 0

    def note(self, sample: TransferSample, now_ns: int) -> bool:
        """Learn from a transfer; False: it cannot have been one."""
        is_one = sample.num_blocks >= 1 and sample.num_bytes >= 1 and sample.depth >= 1
        if not is_one or not self._fit.note(_terms(sample), sample.seconds, now_ns):
            return False
        self._depths.append(min(sample.depth, _DEPTH_MAX))
        return True

    def is_slow(self, sample: TransferSample) -> bool:
        """Tell whether a transfer took about as long as one expects of such a one, or longer."""
        return sample.seconds > _ABOUT * self._fit.mean_s(_terms(sample))

    def note_whole(self, predicted_s: float, seconds: float, now_ns: int) -> None:
        """Learn from a whole restore, with what its transfers should have taken together."""
        self._whole.note((predicted_s,), seconds, now_ns)

    def is_stale(self, now_ns: int, after_ns: int) -> bool:
        """Tell whether nothing was measured for so long."""
        noted_ns = self._fit.noted_ns
        return noted_ns is None or abs(now_ns - noted_ns) >= after_ns

    @property
    def looks_faster(self) -> bool:
        """Tell whether the last measurement was far below what was expected."""
        return self._fit.looks_faster

    def speed(self, block_bytes: int) -> RouteSpeed:
        """Return how blocks of a size are moved, as far as one knows now."""
        start_s, per_block, per_byte, per_byte_more = self._fit.rates
        lag = self._whole.rates[0]
        # The engine copies blocks as they come, in one go; a tier is read in parts.
        is_cut = self._tier is not TierName.CPU
        part = transfer_blocks(block_bytes) if is_cut else 1 << 30
        return RouteSpeed(
            start_s=start_s * lag,
            block_s=max(per_block + block_bytes * per_byte, 1e-9) * lag,
            part_blocks=part,
            depth=max(self._depths) if is_cut else 1,
            crowd_s=part * block_bytes * per_byte_more * lag if is_cut else 0.0,
            lag=lag,
            tail=self._fit.tail,
            tail_whole=self._whole.tail,
        )

    def bytes_per_s(self) -> float:
        """Return what one transfer that flies alone moves, of the usual size."""
        return 8 * _MIB / self._fit.mean_s(_USUAL)

    def document(self) -> dict[str, Any]:
        """Return what was learned, and the bandwidth that follows from it."""
        return {
            **self._fit.document(),
            "depth": max(self._depths),
            "bytes_per_s": self.bytes_per_s(),
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learned; raises ValueError where it is not such."""
        depth = int(number(document.get("depth"), 1, _DEPTH_MAX))
        self._fit.recall(document)
        self._depths.append(depth)
        self._is_recalled = True


def _terms(sample: TransferSample) -> tuple[float, float, float, float]:
    num_bytes, depth = sample.num_bytes, min(sample.depth, _DEPTH_MAX)
    return 1.0, sample.num_blocks, num_bytes, num_bytes * (depth - 1)


class RouteCosts:
    """The routes of all tiers, up and down."""

    def __init__(self) -> None:
        self._routes = {
            (tier, is_read): RouteCost(tier) for tier in LOWER_TIERS for is_read in (True, False)
        }

    def route(self, tier: TierName, *, is_read: bool = True) -> RouteCost:
        """Return a tier's route; the CPU tier's leads into the engine."""
        return self._routes[tier, is_read]

    def document(self) -> dict[str, Any]:
        """Return what was learned, by tier and direction; only what was measured."""
        return {
            f"{tier}_{'read' if is_read else 'write'}": route.document()
            for (tier, is_read), route in self._routes.items()
            if route.is_known
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learned; raises ValueError where it is not such."""
        for (tier, is_read), route in self._routes.items():
            if part := table(document, f"{tier}_{'read' if is_read else 'write'}"):
                route.recall(part)
