"""The page that says how to set up what is here, and lists it."""

from collections.abc import Sequence

from deploy.source.alert import ALERTS
from deploy.source.board import Board
from deploy.source.recording import RECORDINGS

__all__ = ["render"]

_HEAD = """\
# Dashboards, rules and alerts

<!-- Written by `make docs` from deploy/source; change it there. -->

Everything here is in `deploy/prometheus` and `deploy/grafana`, made from the same table as
[metrics.md](metrics.md), so that no query names what is not exposed. Continuous integration runs
each one in a real Prometheus that scrapes a node under load, and what a real vLLM told.

## Setting it up

1. Have Prometheus scrape the daemon at `http.listen`, and the engines: vLLM at its own port,
   kvtier's own at `engine.listen`. Both of kvtier's are on loopback unless you say otherwise.

   ```yaml
   rule_files: [/etc/prometheus/kvtier/*.yml]
   scrape_configs:
     - job_name: kvtier  # daemons alone: so one that never answered is missed, too
       static_configs:
         - targets: ["localhost:9464"]
     - job_name: engines
       static_configs:
         - targets: ["localhost:8000"]
   ```

2. Copy `deploy/prometheus/*.yml` to where `rule_files` looks, and reload. Alerts use two of the
   recording rules, so take both files.
3. In Grafana (11 or newer) import each file of `deploy/grafana`, or put them where it is
   provisioned from. The dashboards need no recording rule. They ask for the data source, and can be
   narrowed to some jobs and instances. Of vLLM they count only those with kvtier, as the rules do.

Links lead to `docs/operations/runbook.md`; if you serve it somewhere, have them lead there:
`python -m deploy.source --runbook https://wiki.example/kvtier --out DIRECTORY`.
"""

_RULES_HEAD = """\

## Recording rules

The names that operators know from the field, of kvtier's own engines and of each vLLM that is
scraped, without kvtier too. `instance` stands for all labels of a target; to average over nodes
divide sums, not ratios. Two things are not the same for both: offload latency between GPU and CPU
is that of a block, and of vLLM that of one request's blocks; and stall is told by kvtier's own
engines alone, for vLLM does not count it (the dashboards show a share of the moments at which one
looked).

| known as | rule |
|---|---|
"""

_ALERTS_HEAD = """\

## Alerts

On harm, not on fullness. `critical` is for now, `warning` for today, `info` for the next look
at kvtier: nobody waits longer for it than without. Each leads to its section of the
[runbook](runbook.md). Nothing fires for a few requests, nor because Prometheus was away for hours.

| alert | severity | after | what it says |
|---|---|---|---|
"""


def render(boards: Sequence[Board]) -> str:
    """Return docs/operations/dashboards.md."""
    parts = [_HEAD, *(_board(board) for board in boards), _RULES_HEAD]
    parts += [f"| {each.known_as} | `{each.record}` |\n" for each in RECORDINGS]
    parts.append(_ALERTS_HEAD)
    for each in ALERTS:
        summary = each.summary.replace("{{ $labels.", "*").replace(" }}", "*")
        link = f"[{each.name}](runbook.md#{each.name.lower()})"
        parts.append(f"| {link} | {each.severity} | {each.hold} | {summary} |\n")
    return "".join(parts)


def _board(board: Board) -> str:
    lines = [f"\n## {board.title}\n\n{board.description}\n\n| panel | what it shows |\n|---|---|\n"]
    for section in board.sections:
        lines.append(f"| **{section.title}** | |\n")
        lines += [f"| {panel.title} | {panel.description} |\n" for panel in section.panels]
    return "".join(lines)
