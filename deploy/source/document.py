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
each one in a real Prometheus that scrapes a node under load.

## Setting it up

1. Have Prometheus scrape the daemon at `http.listen`, and kvtier's own engines at `engine.listen`;
   both are on loopback unless you say otherwise. vLLM has its own metrics at its own port.

   ```yaml
   rule_files: [/etc/prometheus/kvtier/*.yml]
   scrape_configs:
     - job_name: kvtier
       static_configs:
         - targets: ["localhost:9464", "localhost:8000"]
   ```

2. Copy `deploy/prometheus/*.yml` to where `rule_files` looks, and reload. Alerts use two of the
   recording rules, so take both files. No job has to have a certain name.
3. In Grafana (11 or newer) import each file of `deploy/grafana`, or put them where it is
   provisioned from. The dashboards need no recording rule. They ask for the data source, and can be
   narrowed to some jobs and instances.

Links lead to `docs/operations/runbook.md`; if you serve it somewhere, have them lead there:
`python -m deploy.source --runbook https://wiki.example/kvtier --out DIRECTORY`.
"""

_RULES_HEAD = """\

## Recording rules

The names that operators know from the field. `instance` stands for all labels of a target; to
average over nodes divide sums, not ratios.

| known as | rule |
|---|---|
"""

_ALERTS_HEAD = """\

## Alerts

On harm, not on fullness. `critical` is for now, `warning` for today, `info` for whoever mends
kvtier. Each leads to its section of the [runbook](runbook.md).

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
