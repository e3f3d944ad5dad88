"""Recommends tier sizes from the hit curve of a trace.

Theory
------
Hits grow roughly with the logarithm of a cache's size until most reused blocks fit, and hardly
after that. Over the logarithm of size, the *knee* is the point of the curve that is highest above
the straight line from its first to its last point: below it a doubling gains much, above it little.
The CPU tier is worth its price up to the knee; the SSD provides the rest of the target.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.sim.replay.setup import Machine
from kvtier.sim.replay.study import Study

__all__ = ["Point", "Sizes", "Target", "break_even_bytes_per_s", "curve_of", "knee", "sizes_for"]

_SSD_SPARE = 1.15
"""The store needs space for its own records and for segments being emptied."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target, at most one of these; without one, sizes up to the knee are worth their price."""

    hit_ratio: float | None = None
    saved_share: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One size on the curve."""

    num_blocks: int
    hit_ratio: float
    saved_share: float
    best_ratio: float
    """Hit ratio of the optimal policy."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Recommended sizes."""

    cpu_blocks: int
    ssd_blocks: int
    is_reached: bool
    """The target is within the replayed sizes."""
    expected: Point
    """Point of the curve for both tiers together."""


def curve_of(study: Study) -> list[Point]:
    """Return the curve of a study of one policy, in order of size."""
    points = [
        Point(
            run.cpu_blocks,
            run.whole.ratio(),
            run.whole.saved_share,
            study.bound(run.cpu_blocks + run.ssd_blocks).ratio,
        )
        for run in study.runs
    ]
    return sorted(points, key=lambda point: point.num_blocks)


def knee(curve: Sequence[Point]) -> Point:
    """Return the knee of the curve; the smallest point if size gains nothing."""
    first, last = curve[0], curve[-1]
    width = math.log(last.num_blocks / first.num_blocks) or 1.0

    def height(point: Point) -> float:
        share = math.log(point.num_blocks / first.num_blocks) / width
        return point.hit_ratio - first.hit_ratio - share * (last.hit_ratio - first.hit_ratio)

    return max(curve, key=lambda point: (height(point), -point.num_blocks))


def sizes_for(curve: Sequence[Point], target: Target, block_bytes: int) -> Sizes:
    """Return sizes that reach a target, or the largest on the curve if none does."""
    if target.memory_bytes is not None:
        num_blocks = max(1, target.memory_bytes // block_bytes)
        wanted = next((p for p in curve if p.num_blocks >= num_blocks), curve[-1])
        saturated = _saturated(curve)
        more = max(0, saturated.num_blocks - num_blocks)
        return Sizes(num_blocks, math.ceil(more * _SSD_SPARE), True, wanted)
    if target == Target():
        reaching = [_saturated(curve)]
    else:
        reaching = [point for point in curve if _reaches(point, target)]
    wanted = reaching[0] if reaching else curve[-1]
    cpu_blocks = min(wanted.num_blocks, knee(curve).num_blocks)
    more = wanted.num_blocks - cpu_blocks
    return Sizes(cpu_blocks, math.ceil(more * _SSD_SPARE), bool(reaching), wanted)


def break_even_bytes_per_s(machine: Machine) -> float:
    """Return how fast a tier must be to restore tokens sooner than they are computed.

    This is for short prompts; tokens deep in a long one take longer to compute and need less.
    """
    return machine.token_bytes / machine.prefill.token_s


def _reaches(point: Point, target: Target) -> bool:
    if target.hit_ratio is not None:
        return point.hit_ratio >= target.hit_ratio
    return point.saved_share >= (target.saved_share or 0.0)


def _saturated(curve: Sequence[Point]) -> Point:
    """Return the first point that hits nearly as much as the last."""
    return next(point for point in curve if point.hit_ratio >= 0.98 * curve[-1].hit_ratio)
