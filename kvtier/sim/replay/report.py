"""Reports of a study: tables for a terminal (80 columns, no colour), and a self-contained page."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources

from kvtier import __version__
from kvtier.core.residency import TierName
from kvtier.core.tier_registry import STORE_TIER
from kvtier.sim.replay.chart import Axis, Series, bars, lines
from kvtier.sim.replay.results import ReplayRun, TraceSummary
from kvtier.sim.replay.study import Study

__all__ = ["study_page", "study_text"]


_COLUMNS = 80


def study_text(study: Study) -> str:
    """Return the tables for a terminal."""
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
        f"{trace['name']}: {trace['requests']:,} requests in {_duration(trace['seconds'])}, "
        f"{trace['tokens'] / 1e6:,.1f} M tokens"
    )
    yield (
        f"{trace['distinct_blocks']:,} distinct blocks of {trace['block_tokens']} tokens; "
        f"the longest prompt has {trace['longest_blocks']:,}"
    )
    if study.is_instant:
        yield "instant: transfers and computation take no time"
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
            f"{part.ratio([STORE_TIER]):>8.3f}{best:>8.3f}"
            f"{part.saved_share:>9.3f}"
        )


def _times(study: Study) -> Iterator[str]:
    if study.is_instant:
        return
    yield "time to first token       mean      p50      p90      p99   speedup vs no cache"
    for run in study.runs:
        ttft, cold = run.whole.ttft, run.whole.cold
        name = f"{run.policy} {run.cpu_blocks}+{run.ssd_blocks}"
        yield (
            f"{name:<20}{_column(ttft.mean_s)}{_column(ttft.p50_s)}{_column(ttft.p90_s)}"
            f"{_column(ttft.p99_s)}   {cold.mean_s / max(1e-9, ttft.mean_s):.2f}x on average"
        )
    cold = study.runs[0].whole.cold
    yield (
        f"{'no cache':<20}{_column(cold.mean_s)}{_column(cold.p50_s)}{_column(cold.p90_s)}"
        f"{_column(cold.p99_s)}"
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


def _part(run: ReplayRun, *, is_half: bool) -> TraceSummary:
    return run.second_half if is_half else run.whole


def _column(seconds: float) -> str:
    return f"{seconds * 1000:>7.0f}ms" if seconds < 10 else f"{seconds:>8.1f}s"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


_SHARE = Axis("share of prompt tokens", lambda value: f"{value:.0%}")
_BARS_MAX = 6
"""More bars do not fit side by side with their labels."""

_WORDS = (
    ("hits", "Share of prompt tokens restored from a tier instead of computed."),
    ("optimal policy", "Hits of a policy that knows the future; no real policy reaches it."),
    ("saved", "Share of the time to first token of the same requests without a cache."),
    ("TTFT", "Time to first token: half of the requests are faster than p50, 99 of 100 than p99."),
    ("written, read back", "Blocks written to the SSD tier, and blocks read from it."),
)


def study_page(study: Study) -> str:
    """Return the HTML page."""
    title = f"kvtier replay of {study.trace['name']}"
    body = "\n".join(_body(study, title))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _style() -> str:
    return resources.files("kvtier.sim.replay").joinpath("report.css").read_text()


def _body(study: Study, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    how = (
        "without time, to compare what each policy keeps" if study.is_instant else "event by event"
    )
    yield f"<p>Replayed {how}, with the production node, policies and cost model.</p>"
    for note in study.trace["notes"]:
        yield f"<p>Note: {escape(note)}.</p>"
    yield _facts(study)
    yield f'<div class="figures">{"".join(_figures(study))}</div>'
    yield "<h2>All runs</h2>"
    yield f'<div class="wide">{_table(study)}</div>'
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(said)}</dd>" for word, said in _WORDS)
    yield f"<dl>{words}</dl>"
    yield "<details><summary>Terminal output, with the second half by time</summary>"
    yield f"<pre>{escape(study_text(study))}</pre></details>"
    yield f"<footer>kvtier {escape(__version__)}</footer>"


def _facts(study: Study) -> str:
    best = max(study.runs, key=lambda run: run.whole.saved_s)
    facts = [
        (f"{study.trace['requests']:,}", "requests"),
        (f"{study.trace['tokens'] / 1e6:,.1f} M", "prompt tokens"),
        (f"{best.whole.ratio():.1%}", f"restored by {best.policy}, the best policy"),
        (f"{best.whole.saved_share:.1%}", "of time to first token saved by it"),
        (_span(best.whole.saved_s), "saved by it, all requests"),
    ]
    cards = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in facts
    )
    return f'<div class="facts">{cards}</div>'


def _figures(study: Study) -> Iterator[str]:
    sizes = sorted({float(run.cpu_blocks) for run in study.runs})
    blocks = Axis(
        f"CPU tier, in blocks of {study.trace['block_tokens']} tokens",
        lambda value: f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:,.0f}",
        is_log=True,
        marks=sizes if len(sizes) <= 8 else (),
    )
    yield lines(
        "Tokens restored instead of computed",
        blocks,
        _SHARE,
        [
            *_curves(study, lambda run: run.whole.ratio()),
            Series("optimal policy", _bounds(study), "bound"),
        ],
    )
    yield lines(
        "Time saved",
        blocks,
        Axis("share of time to first token", lambda value: f"{value:.0%}"),
        _curves(study, lambda run: run.whole.saved_share),
    )
    largest = _largest(study)
    if not study.is_instant:
        yield _waits(study, largest)
    if any(run.ssd_blocks for run in study.runs):
        yield from _tiers(study)


def _waits(study: Study, runs: Sequence[ReplayRun]) -> str:
    """Return the chart of times to first token."""

    def curve(quantiles: Sequence[float]) -> list[tuple[float, float]]:
        last = len(quantiles) - 1
        return [(max(at, 1e-3), place / last) for place, at in enumerate(quantiles)]

    series = [Series(_name(study, run), curve(run.ttft_curve)) for run in runs]
    series.append(Series("no cache", curve(runs[0].cold_curve), "cold"))
    return lines(
        f"Time to first token with a CPU tier of {runs[0].cpu_blocks:,} blocks",
        Axis("seconds after the request", lambda value: f"{value:g}", is_log=True),
        Axis("share of requests", lambda value: f"{value:.0%}"),
        series,
    )


def _tiers(study: Study) -> Iterator[str]:
    runs = study.runs if len(study.runs) <= _BARS_MAX else _largest(study)[:_BARS_MAX]
    yield bars(
        "Restored tokens by tier",
        _SHARE,
        [
            (
                _label(run),
                [
                    (f"from {tier}", count / max(1, run.whole.num_tokens))
                    for tier, count in run.whole.hit_tokens.items()
                ],
            )
            for run in runs
        ],
    )
    yield bars(
        "Blocks written to and read from the SSD",
        Axis("blocks", lambda value: f"{value:,.0f}"),
        [
            (_label(run), [("written", run.written_blocks), ("read back", run.read_blocks)])
            for run in runs
        ],
    )


def _curves(study: Study, value: Callable[[ReplayRun], float]) -> list[Series]:
    names = list(dict.fromkeys(_name(study, run) for run in study.runs))
    return [
        Series(
            name,
            sorted((run.cpu_blocks, value(run)) for run in study.runs if _name(study, run) == name),
        )
        for name in names
    ]


def _bounds(study: Study) -> list[tuple[float, float]]:
    """Return the optimum by CPU tier size, with the SSD's blocks added."""
    sizes = {run.cpu_blocks: run.cpu_blocks + run.ssd_blocks for run in study.runs}
    return [(cpu, study.bound(total).ratio) for cpu, total in sorted(sizes.items())]


def _name(study: Study, run: ReplayRun) -> str:
    has_several = len({each.ssd_blocks for each in study.runs}) > 1
    return f"{run.policy} + SSD of {run.ssd_blocks:,}" if has_several else run.policy


def _label(run: ReplayRun) -> str:
    return f"{run.policy}\n{run.cpu_blocks:,}"


def _largest(study: Study) -> Sequence[ReplayRun]:
    """Return every policy's run with the largest CPU tier."""
    most = max(run.cpu_blocks for run in study.runs)
    return [run for run in study.runs if run.cpu_blocks == most]


def _span(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _table(study: Study) -> str:
    titles = ["policy", "CPU blocks", "SSD blocks", "hits", "from CPU", "from SSD"]
    titles += ["optimal policy", "saved", "TTFT p50", "p90", "p99", "written", "read back"]
    rows = []
    for run in study.runs:
        part, bound = run.whole, study.bound(run.cpu_blocks + run.ssd_blocks)
        cells = [
            run.policy,
            f"{run.cpu_blocks:,}",
            f"{run.ssd_blocks:,}",
            f"{part.ratio():.1%}",
            *(f"{count / max(1, part.num_tokens):.1%}" for count in part.hit_tokens.values()),
            f"{bound.ratio:.1%}",
            f"{part.saved_share:.1%}",
            *map(_seconds, (part.ttft.p50_s, part.ttft.p90_s, part.ttft.p99_s)),
            f"{run.written_blocks:,}",
            f"{run.read_blocks:,}",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
