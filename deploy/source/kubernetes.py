"""Rules in the format of the Prometheus operator."""

import yaml

from deploy.source import rules

__all__ = ["prometheus_rule"]


def prometheus_rule(runbook: str) -> str:
    """Return a PrometheusRule with all recording rules and alerts."""
    files = [yaml.safe_load(text) for text in (rules.recordings(), rules.alerts(runbook))]
    return rules.render(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "kvtier", "labels": {"app.kubernetes.io/name": "kvtier"}},
            "spec": {"groups": [group for file in files for group in file["groups"]]},
        }
    )
