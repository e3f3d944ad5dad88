"""Paths and texts of the generated files."""

from collections.abc import Mapping, Sequence

from deploy.source import document, grafana, kubernetes, rules
from deploy.source.board import Board
from deploy.source.decisions import DECISIONS_BOARD
from deploy.source.engine import ENGINE
from deploy.source.overview import OVERVIEW
from deploy.source.tiers import TIERS

__all__ = ["BOARDS", "RUNBOOK", "files"]

BOARDS: Sequence[Board] = (OVERVIEW, TIERS, DECISIONS_BOARD, ENGINE)
"""In the order of the menu."""

RUNBOOK = "docs/operations/runbook.md"
"""Target of runbook links by default."""


def files(runbook: str = RUNBOOK) -> Mapping[str, str]:
    """Return each file's text by its path in the repository."""
    return {
        "deploy/prometheus/recording.yml": rules.recordings(),
        "deploy/prometheus/alerts.yml": rules.alerts(runbook),
        "deploy/kubernetes/components/monitoring/prometheusrule.yaml": kubernetes.prometheus_rule(
            runbook
        ),
        "docs/operations/dashboards.md": document.render(BOARDS),
        **{f"deploy/grafana/{board.name}.json": grafana.render(board, runbook) for board in BOARDS},
    }
