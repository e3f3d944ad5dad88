"""docs/operations/metrics.md, written from the table."""

from kvtier.observe.daemon_metrics import (
    DAEMON_METRICS,
)
from kvtier.observe.engine_metrics import (
    ENGINE_METRICS,
)
from kvtier.observe.metrics import Metric

__all__ = ["render_reference"]

_HEAD = """\
# Metrics

<!-- Written by `make docs` from the tables in kvtier/observe; change it there. -->

The daemon serves its metrics at `http.listen`, an engine at `engine.listen`, both under `/metrics`
in the Prometheus text format. Units are base units. Each label has a closed set of values, all of
which exist from the start, so the number of series is fixed. Both also tell what Prometheus'
clients tell of any process, under `process_`: CPU time, memory, open descriptors, start. A scrape
waits for nothing: counters are up to the moment and gauges to the second, and where the daemon's
loop is held up it is answered with what was there before; `kvtier_loop_silent_seconds` says for how
long.

## Tokens that add up

With no load open, every token that an engine asks the daemon for is in one place of each line
(`_tokens_total` left out):

    kvtier_asked    =  sum of kvtier_found (by tier)   + kvtier_absent
    kvtier_found    =  sum of kvtier_left (by reason)  + what may be ordered
    kvtier_ordered  =  sum of kvtier_loaded (by tier)  + sum of kvtier_unloaded (by reason)

What may be ordered is as a rule ordered; the rest are requests that went away or found another way.
A block may be found in one tier and loaded from another, if it was brought up in between. What was
used of what was loaded, and what was computed in spite of all, an engine counts for itself:

    sum of kvtier_prompt  =  gpu + cpu + ssd + remote (used)  +  computed

So `computed` is what was never asked for (the end of a prompt that fills no block) with what was
absent, left and unloaded; and of a loaded block of which the engine had a part, the rest is used.

## Time lost to restoring

`kvtier_restore_stall_seconds_total` is time in which the engine had requests and computed nothing
at all, because what could have gone on waited for a tier. It is what restoring costs everybody. A
request that waits while others are computed stalls nobody, and its wait is in its time to first
token; that copies slow down the steps beside them shows in `kvtier_step_seconds` and
`kvtier_inter_token_seconds`, and is in no counter of its own.
"""


def render_reference() -> str:
    """Return docs/operations/metrics.md."""
    parts = [_HEAD]
    for title, table in (("The daemon", DAEMON_METRICS), ("An engine", ENGINE_METRICS)):
        parts.append(f"\n## {title}\n\n| metric | kind | unit | labels | meaning |\n")
        parts.append("|---|---|---|---|---|\n")
        parts.extend(_row(metric) for metric in table)
    return "".join(parts)


def _row(metric: Metric) -> str:
    kind = type(metric).__name__.lower()
    labels = "; ".join(f"`{name}`: {', '.join(closed)}" for name, closed in metric.labels)
    return f"| `{metric.name}` | {kind} | {metric.unit} | {labels} | {metric.help} |\n"
