"""Every metric is recorded, with the labels of its definition."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from source import SOURCE

from kvtier.api.http.service import PromptOutcome
from kvtier.core.admission import RefusalRule
from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.core.residency import TierName
from kvtier.observe import daemon_metrics, engine_metrics, metrics
from kvtier.observe.metrics import Metric
from kvtier.tiers.base import HealthState, MissReason
from kvtier.tiers.breaker import BreakerState

METRICS: dict[str, Metric] = {
    name: getattr(module, name)
    for module in (metrics, daemon_metrics, engine_metrics)
    for name in module.__all__
    if isinstance(getattr(module, name), Metric)
}


@cache
def names_used() -> set[str]:
    """Return all names in the package's code, except in the modules that define metrics."""
    defining = ("kvtier/observe/daemon_metrics.py", "kvtier/observe/engine_metrics.py")
    return {
        node.id
        for module in SOURCE
        if module.name not in defining
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_recorded(name):
    assert name in names_used(), f"nothing records {name}"


def recordings() -> Iterator[tuple[str, Metric, dict[str, ast.expr]]]:
    """Yield each place where a row is recorded by its name, and the labels given there."""
    for module in SOURCE:
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            first = node.args[0] if node.args else None
            if not (isinstance(first, ast.Name) and first.id in METRICS):
                continue
            labels = {each.arg: each.value for each in node.keywords if each.arg}
            if node.func.attr == "set_one" and isinstance(node.args[1], ast.Constant):
                labels[node.args[1].value] = node.args[2]
            if node.func.attr in {"add", "set", "set_one", "observe"}:
                yield f"{module.name}:{node.lineno}", METRICS[first.id], labels


RECORDINGS = {f"{where} {row.name}": (row, labels) for where, row, labels in recordings()}


@pytest.mark.parametrize("where", RECORDINGS)
def test_labels_are_those_of_the_row_and_of_its_closed_sets(where):
    row, labels = RECORDINGS[where]
    assert labels.keys() == dict(row.labels).keys(), where
    for name, closed in row.labels:
        given = labels[name]
        if isinstance(given, ast.Constant):
            assert given.value in closed, f"{where}: {name} is never {given.value!r}"


def test_closed_sets_are_those_of_the_code():
    for row, label, values in (
        (daemon_metrics.MISS_BLOCKS, "reason", {*MissReason, "fault", "late"}),
        (daemon_metrics.TIER_STATE, "state", {*HealthState, "off"}),
        (daemon_metrics.BREAKER_STATE, "state", {*BreakerState}),
        (daemon_metrics.MISSED_BLOCKS, "fate", {*Fate}),
        (daemon_metrics.REFUSED_BLOCKS, "rule", {*RefusalRule}),
        (daemon_metrics.DECISIONS, "reason", {*PlanReason}),
        (engine_metrics.REQUESTS, "outcome", {*PromptOutcome}),
        (engine_metrics.PROMPT_TOKENS, "source", {*TierName, "computed"}),
    ):
        assert set(dict(row.labels)[label]) == values, f"{row.name}: {label}"


def test_every_metric_belongs_to_a_process():
    exposed = {
        metric.name for metric in (*daemon_metrics.DAEMON_METRICS, *engine_metrics.ENGINE_METRICS)
    }
    assert exposed == {metric.name for metric in METRICS.values()}
