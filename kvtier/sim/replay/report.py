"""A study as text for a terminal: 80 columns, no colour."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from html import escape

from kvtier import __version__
from kvtier.core.residency import TierName
from kvtier.core.tier_registry import STORE_TIER
from kvtier.sim.replay.chart import Axis, Series, bars, lines
from kvtier.sim.replay.results import ReplayRun, TraceSummary
from kvtier.sim.replay.study import Study

__all__ = ["study_page", "study_text"]


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
        f"{trace['name']}: {trace['requests']:,} requests in {_duration(trace['seconds'])}, "
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
            f"{part.ratio([STORE_TIER]):>8.3f}{best:>8.3f}"
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
            f"{name:<20}{_column(ttft.mean_s)}{_column(ttft.p50_s)}{_column(ttft.p90_s)}"
            f"{_column(ttft.p99_s)}   {cold.mean_s / max(1e-9, ttft.mean_s):.2f}x in the mean"
        )
    cold = study.runs[0].whole.cold
    yield (
        f"{'nothing kept':<20}{_column(cold.mean_s)}{_column(cold.p50_s)}{_column(cold.p90_s)}"
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


_STYLE = (
    """
:root { color-scheme: light dark; }
:root { --ink: #1d2433; --soft: #5b6475; --paper: #fbfbf9; --card: #fff; --rule: #e3e4e0;
  --c0: #0b6e99; --c1: #c2571a; --c2: #3c8d40; --c3: #8e4ec6; --c4: #b8860b; --c5: #c0392b;
  --c6: #50707c; --c7: #d16ba5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ee; --soft: #9aa3b5; --paper: #14171d;
  --card: #1b1f27; --rule: #2d333f; --c0: #58b4dd; --c1: #f0955c; --c2: #7bc97f; --c3: #c39af0;
  --c4: #e2b84c; --c5: #f0776a; --c6: #a3bcc6; --c7: #eba3cb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 2.5rem 1.5rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; margin: 0; letter-spacing: -0.01em; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 0.75rem; }
p { max-width: 46rem; color: var(--soft); margin: 0.4rem 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.75rem;
  margin: 1.5rem 0; }
.fact { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 0.8rem 1rem; }
.fact b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.fact span { color: var(--soft); font-size: 0.85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 1rem; }
figcaption { font-weight: 600; margin-bottom: 0.5rem; }
svg { width: 100%; height: auto; display: block; }
.label { fill: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2.25; stroke-linejoin: round; stroke-linecap: round; }
.bound, .cold { stroke: var(--soft); stroke-dasharray: 5 5; fill: var(--soft); }
.line.bound, .line.cold { fill: none; }
.dot { stroke-width: 0; }
.dot:hover { r: 6; }
.keys { display: flex; flex-wrap: wrap; gap: 0.2rem 1.1rem; margin-top: 0.5rem; font-size: 0.85rem;
  color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 0.75rem; height: 0.75rem;
  border-radius: 3px; margin-right: 0.4rem; vertical-align: -0.08rem; background: var(--soft); }
.key.bound::before, .key.cold::before { width: 1.2rem; height: 0; border-radius: 0;
  border-top: 2px dashed var(--soft); vertical-align: 0.25rem; background: none; }
"""
    + "\n".join(
        f".s{n} {{ stroke: var(--c{n}); }} .dot.s{n}, .bar.s{n} {{ fill: var(--c{n}); }} "
        f".key.s{n}::before {{ background: var(--c{n}); }}"
        for n in range(8)
    )
    + """
.bar { stroke: none; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; overflow: hidden;
  font-variant-numeric: tabular-nums; background: var(--card);
  border: 1px solid var(--rule); border-radius: 10px; }
th, td { text-align: right; padding: 0.4rem 0.7rem; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td { white-space: nowrap; }
tbody tr:last-child td { border-bottom: none; }
.wide { overflow-x: auto; }
summary { cursor: pointer; font-weight: 600; margin-top: 2.5rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1.2rem; font-size: 0.9rem;
  max-width: 60rem; }
dt { font-weight: 600; }
dd { margin: 0; color: var(--soft); }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 1rem;
  overflow-x: auto; font-size: 0.8rem; line-height: 1.35; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.85rem; }
@media (max-width: 640px) { body { padding: 1.25rem 0.75rem 2rem; } h1 { font-size: 1.35rem; }
  .label { font-size: 19px; } .facts { grid-template-columns: 1fr 1fr; }
  figure { padding: 0.6rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: 0.4rem; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --card: #fff;
  --rule: #ccc; --c0: #0b6e99; --c1: #c2571a; --c2: #3c8d40; --c3: #8e4ec6; --c4: #b8860b;
  --c5: #c0392b; --c6: #50707c; --c7: #d16ba5; }
  body { max-width: none; padding: 0; font-size: 10pt; print-color-adjust: exact; }
  .facts { grid-template-columns: repeat(5, 1fr); } .fact b { font-size: 1.1rem; }
  .figures { grid-template-columns: 1fr 1fr; } .label { font-size: 19px; }
  .keys { font-size: 8pt; } dl { font-size: 8.5pt; margin-top: 1rem; }
  figure, .fact, tr, dl { break-inside: avoid; }
  table { font-size: 7.5pt; } th, td { padding: 0.2rem 0.3rem; } .wide { overflow: visible; }
  details { display: none; } }
"""
)

_SHARE = Axis("share of the prompts' tokens", lambda value: f"{value:.0%}")
_BARS_MAX = 6
"""More do not stand side by side with their names below."""

_WORDS = (
    ("hits", "Share of the prompts' tokens that came from a tier and need not be computed."),
    ("best in hindsight", "Hits of the choice that knows the future; no policy gets there."),
    ("saved", "Share of the seconds that the same requests take with nothing kept."),
    ("TTFT", "Time to first token: half of the requests have it by p50, 99 of 100 by p99."),
    ("written, read back", "Blocks that went to the SSD tier, and blocks that came back from it."),
)


def study_page(study: Study) -> str:
    """Return the page."""
    title = f"kvtier replay of {study.trace['name']}"
    body = "\n".join(_body(study, title))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _body(study: Study, title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    how = "without time: what each policy keeps" if study.is_instant else "event by event"
    yield f"<p>Replayed {how}, with the node, the policies and the cost model that serve.</p>"
    for note in study.trace["notes"]:
        yield f"<p>Note: {escape(note)}.</p>"
    yield _facts(study)
    yield f'<div class="figures">{"".join(_figures(study))}</div>'
    yield "<h2>All runs</h2>"
    yield f'<div class="wide">{_table(study)}</div>'
    words = "".join(f"<dt>{escape(word)}</dt><dd>{escape(said)}</dd>" for word, said in _WORDS)
    yield f"<dl>{words}</dl>"
    yield "<details><summary>As in the terminal, with the second half by time</summary>"
    yield f"<pre>{escape(study_text(study))}</pre></details>"
    yield f"<footer>kvtier {escape(__version__)}</footer>"


def _facts(study: Study) -> str:
    best = max(study.runs, key=lambda run: run.whole.saved_s)
    facts = [
        (f"{study.trace['requests']:,}", "requests"),
        (f"{study.trace['tokens'] / 1e6:,.1f} M", "tokens of prompts"),
        (f"{best.whole.ratio():.1%}", f"not computed, at best: {best.policy}"),
        (f"{best.whole.saved_share:.1%}", "of the seconds saved by it"),
        (_span(best.whole.saved_s), "saved by it, all requests together"),
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
        "Tokens that need not be computed",
        blocks,
        _SHARE,
        [
            *_curves(study, lambda run: run.whole.ratio()),
            Series("best in hindsight", _bounds(study), "bound"),
        ],
    )
    yield lines(
        "Seconds saved",
        blocks,
        Axis("share of the seconds", lambda value: f"{value:.0%}"),
        _curves(study, lambda run: run.whole.saved_share),
    )
    largest = _largest(study)
    if not study.is_instant:
        yield _waits(study, largest)
    if any(run.ssd_blocks for run in study.runs):
        yield from _tiers(study)


def _waits(study: Study, runs: Sequence[ReplayRun]) -> str:
    """Return how many requests have their first token by when."""

    def curve(quantiles: Sequence[float]) -> list[tuple[float, float]]:
        last = len(quantiles) - 1
        return [(max(at, 1e-3), place / last) for place, at in enumerate(quantiles)]

    series = [Series(_name(study, run), curve(run.ttft_curve)) for run in runs]
    series.append(Series("nothing kept", curve(runs[0].cold_curve), "cold"))
    return lines(
        f"How soon the first token comes, with a CPU tier of {runs[0].cpu_blocks:,} blocks",
        Axis("seconds since the request", lambda value: f"{value:g}", is_log=True),
        Axis("share of the requests", lambda value: f"{value:.0%}"),
        series,
    )


def _tiers(study: Study) -> Iterator[str]:
    runs = study.runs if len(study.runs) <= _BARS_MAX else _largest(study)[:_BARS_MAX]
    yield bars(
        "Where restored tokens came from",
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
        "Blocks to and from the SSD",
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
    """Return the bound by the CPU tier's size, with the SSD's blocks on top."""
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


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.1f} s"


def _table(study: Study) -> str:
    titles = ["policy", "CPU blocks", "SSD blocks", "hits", "from CPU", "from SSD"]
    titles += ["best in hindsight", "saved", "TTFT p50", "p90", "p99", "written", "read back"]
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
            *map(_time, (part.ttft.p50_s, part.ttft.p90_s, part.ttft.p99_s)),
            f"{run.written_blocks:,}",
            f"{run.read_blocks:,}",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
