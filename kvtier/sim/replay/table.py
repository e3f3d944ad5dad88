"""A study as text for a terminal: 80 columns, no colour."""

import textwrap
from collections.abc import Iterator

from kvtier.core.residency import TierName
from kvtier.sim.replay.record import Part, ReplayRun
from kvtier.sim.replay.study import Study

__all__ = ["study_text"]

_COLUMNS = 80


def study_text(study: Study) -> str:
    """Return the tables."""
    parts = [
        [*_head(study)],
        [*_hits(study, "whole trace", is_half=False)],
        [*_hits(study, "second half by time", is_half=True)],
        [*_times(study)],
        [*_costs(study)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _head(study: Study) -> Iterator[str]:
    trace = study.trace
    yield (
        f"{trace['name']}: {trace['requests']:,} requests in {_span(trace['seconds'])}, "
        f"{trace['tokens'] / 1e6:,.1f} M tokens"
    )
    yield (
        f"{trace['distinct_blocks']:,} distinct blocks of {trace['block_tokens']} tokens; "
        f"the longest prompt has {trace['longest_blocks']:,}"
    )
    if study.is_instant:
        yield "instant: nothing takes time, and what is restored or stored is so at once"
    for note in trace["notes"]:
        yield from textwrap.wrap(f"note: {note}", _COLUMNS, subsequent_indent="  ")


def _hits(study: Study, title: str, *, is_half: bool) -> Iterator[str]:
    yield f"{title:<20}     cpu     ssd   hits   from    from    best  seconds"
    yield f"{'policy':<20}  blocks  blocks  tokens    cpu     ssd    hits    saved"
    for run in study.runs:
        part = _part(run, is_half=is_half)
        bound = study.bound(run.cpu_blocks + run.ssd_blocks)
        best = bound.second_half if is_half else bound.ratio
        yield (
            f"{run.policy:<20}{run.cpu_blocks:>8,}{run.ssd_blocks:>8,}"
            f"{part.ratio():>8.3f}{part.ratio([TierName.CPU]):>8.3f}"
            f"{part.ratio([TierName.SSD]):>8.3f}{best:>8.3f}"
            f"{part.saved_share:>9.3f}"
        )


def _times(study: Study) -> Iterator[str]:
    if study.is_instant:
        return
    yield "time to first token       mean      p50      p90      p99   against nothing kept"
    for run in study.runs:
        ttft, cold = run.whole.ttft, run.whole.cold
        name = f"{run.policy} {run.cpu_blocks}+{run.ssd_blocks}"
        yield (
            f"{name:<20}{_time(ttft.mean_s)}{_time(ttft.p50_s)}{_time(ttft.p90_s)}"
            f"{_time(ttft.p99_s)}   {cold.mean_s / max(1e-9, ttft.mean_s):.2f}x in the mean"
        )
    cold = study.runs[0].whole.cold
    yield (
        f"{'nothing kept':<20}{_time(cold.mean_s)}{_time(cold.p50_s)}{_time(cold.p90_s)}"
        f"{_time(cold.p99_s)}"
    )


def _costs(study: Study) -> Iterator[str]:
    above = ("evicted", "evicted", "ssd", "ssd", "written", "lookup", "lookup")
    below = ("cpu", "ssd", "writes", "reads", "per read", "mean", "p99.9")
    for name, titles in (("blocks", above), ("policy", below)):
        widths = zip(titles, (10, 10, 8, 9, 10, 7, 8), strict=True)
        yield f"{name:<18}" + "".join(f"{title:>{width}}" for title, width in widths)
    for run in study.runs:
        name = f"{run.policy} {run.cpu_blocks}+{run.ssd_blocks}"
        ratio = run.written_per_read
        yield (
            f"{name:<18.18}{run.evicted_blocks['cpu']:>10,}{run.evicted_blocks['ssd']:>10,}"
            f"{run.written_blocks:>8,}{run.read_blocks:>9,}"
            f"{'-' if ratio is None else format(ratio, '.2f'):>10}"
            f"{run.decision.mean_s * 1e3:>7.2f}{run.decision_p999_s * 1e3:>8.2f}"
        )


def _part(run: ReplayRun, *, is_half: bool) -> Part:
    return run.second_half if is_half else run.whole


def _time(seconds: float) -> str:
    return f"{seconds * 1000:>7.0f}ms" if seconds < 10 else f"{seconds:>8.1f}s"


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
