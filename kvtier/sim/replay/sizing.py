"""How large the tiers should be: the curve of a trace, where it bends, and what a target takes.

Theory
------
Hits grow with the size of a cache about as its logarithm until most of what comes back fits, and
hardly any more after that. The *bend* is where the curve lies highest above the straight line from
its first to its last point, over the logarithm of size: before it a doubling buys much, behind it
little. The CPU tier is worth its price up to there; the rest of what a target takes is for the SSD.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.sim.replay.setup import Machine
from kvtier.sim.replay.study import Study

__all__ = ["Point", "Sizes", "Target", "break_even_bytes_per_s", "curve_of", "knee", "sizes_for"]

_SSD_SPARE = 1.15
"""The store needs room for its own records and for segments that are being emptied."""


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted, one of them; none: what is worth its price, up to the bend."""

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
    """With knowledge of the future."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to begin with."""

    cpu_blocks: int
    ssd_blocks: int
    is_reached: bool
    """The target is within what was replayed."""
    expected: Point
    """Of both together."""


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
    """Return the point where the curve bends; the smallest, where nothing is gained by size."""
    first, last = curve[0], curve[-1]
    width = math.log(last.num_blocks / first.num_blocks) or 1.0

    def height(point: Point) -> float:
        share = math.log(point.num_blocks / first.num_blocks) / width
        return point.hit_ratio - first.hit_ratio - share * (last.hit_ratio - first.hit_ratio)

    return max(curve, key=lambda point: (height(point), -point.num_blocks))


def sizes_for(curve: Sequence[Point], target: Target, block_bytes: int) -> Sizes:
    """Return sizes that reach a target, or the largest on the curve where none does."""
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
    """Return how fast a tier must be to bring tokens back sooner than they are computed.

    Of short prompts; tokens deep in a long one take longer to compute, and need less.
    """
    return machine.token_bytes / machine.prefill.token_s


def _reaches(point: Point, target: Target) -> bool:
    if target.hit_ratio is not None:
        return point.hit_ratio >= target.hit_ratio
    return point.saved_share >= (target.saved_share or 0.0)


def _saturated(curve: Sequence[Point]) -> Point:
    """Return the first point that hits nearly as much as the last."""
    return next(point for point in curve if point.hit_ratio >= 0.98 * curve[-1].hit_ratio)
