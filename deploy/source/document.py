"""docs/operations/dashboards.md: setup, and a list of all panels, rules and alerts."""

from collections.abc import Sequence

from deploy.source.alert import ALERTS
from deploy.source.board import Board
from deploy.source.recording import RECORDINGS

__all__ = ["render"]

_HEAD = """\
# Dashboards, rules and alerts

<!-- Written by `make docs` from deploy/source; change it there. -->

The files are in `deploy/prometheus` and `deploy/grafana`. They are generated from the same table as
[metrics.md](metrics.md), so no query can name a metric that does not exist. Continuous integration
runs each query in a real Prometheus that scrapes a node under load, and recorded metrics of a real
vLLM.

## Setting it up

1. Let Prometheus scrape the daemon at `http.listen` and the engines: vLLM at its own port,
   kvtier's own at `engine.listen`. kvtier's ports listen on loopback by default.

   ```yaml
   rule_files: [/etc/prometheus/kvtier/*.yml]
   scrape_configs:
     - job_name: kvtier  # only daemons, so that one that never answered is noticed, too
       static_configs:
         - targets: ["localhost:9464"]
     - job_name: engines
       static_configs:
         - targets: ["localhost:8000"]
   ```

2. Copy `deploy/prometheus/*.yml` to a directory of `rule_files`, and reload. The alerts use two
   of the recording rules, so install both files.
3. In Grafana (11 or newer) import each file of `deploy/grafana`, or provision them. The dashboards
   need no recording rules. Select the data source and, optionally, jobs and instances. Dashboards
   and rules only count vLLM with kvtier.

Links point to `docs/operations/runbook.md`. If you publish the runbook elsewhere, regenerate the
files: `python -m deploy.source --runbook https://wiki.example/kvtier --out DIRECTORY`.
"""

_RULES_HEAD = """\

## Recording rules

Common metrics under common names, for kvtier's own engines and for each vLLM that is scraped, with
or without kvtier. `instance` stands for all labels of a target. To average over nodes, divide sums,
not ratios. Two rules differ between engines: offload latency between GPU and CPU is per block, but
for vLLM per request; and stalls are only reported by kvtier's own engines, because vLLM does not
count them (the dashboards estimate its share from samples).

| known as | rule |
|---|---|
"""

_ALERTS_HEAD = """\

## Alerts

Alerts fire on harm, not on full tiers. `critical` needs action now, `warning` today; `info` can
wait, because nobody waits longer than without kvtier. Each links to its section of the
[runbook](runbook.md). Nothing fires for a few requests, or because Prometheus was down for hours.

| alert | severity | after | summary |
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
