"""Every query of every panel, rule and alert, asked of a real Prometheus about the real product."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.source.alert import ALERTS
from deploy.source.recording import RECORDINGS
from kvtier.testing.child import await_true, work_directory
from tests.deploy.gallery import BOARDS, named
from tests.deploy.observed import Observed, observed

pytestmark = [pytest.mark.long, pytest.mark.redis, pytest.mark.timeout(600)]

SOURCES = {"gpu", "cpu", "ssd", "remote", "computed"}
ROUTES = {"cpu_to_ssd", "ssd_to_cpu", "cpu_to_remote", "remote_to_cpu"}
NUM_SCRAPES = 10
START_S = 240
"""A busy machine computes slowly; an idle one takes a tenth of this."""

PANELS = [
    pytest.param(panel, id=f"{file.stem}: {panel['title']}")
    for file in BOARDS
    for panel in json.loads(file.read_text())["panels"]
    if panel["type"] != "row"
]


@pytest.fixture(scope="module")
def seen() -> Iterator[Observed]:
    """A node that has been asked for long enough that each tier has been of use."""
    with work_directory() as directory, observed(directory) as node:
        scraped = f"count_over_time(kvtier_attached[10m]) > {NUM_SCRAPES}"
        await_true(lambda: node.prometheus.now(scraped), f"{NUM_SCRAPES} scrapes", START_S)
        for name, wanted in (
            ("kvtier_time_to_first_token_seconds_count", SOURCES),
            ("kvtier_transfer_seconds_count", ROUTES),
        ):
            label = "source" if wanted is SOURCES else "route"
            expr = f"sum by ({label}) ({name}) > 1"
            await_true(
                lambda expr=expr, label=label, wanted=wanted: (
                    {each["metric"][label] for each in node.prometheus.now(expr)} == wanted
                ),
                f"each of {', '.join(sorted(wanted))} twice",
                START_S,
            )
        yield node


@pytest.mark.parametrize("panel", PANELS)
def test_no_panel_is_empty(seen: Observed, panel: Any) -> None:
    drawn: set[str] = set()
    for target in panel["targets"]:
        found = [
            named(target["legendFormat"], series["metric"])
            for series in seen.prometheus.lately(target["expr"])
            if any(math.isfinite(float(value)) for _, value in series["values"])
        ]
        assert found or "vllm:" not in target["expr"], f"nothing of vLLM: {target['expr']}"
        assert len({*drawn, *found}) == len(drawn) + len(found), f"drawn twice: {found}"
        drawn.update(found)
    assert drawn, f"nothing is drawn of {[target['expr'] for target in panel['targets']]}"


@pytest.mark.parametrize("file", BOARDS, ids=lambda file: file.stem)
def test_there_is_something_to_choose_from(seen: Observed, file: Path) -> None:
    variables = json.loads(file.read_text())["templating"]["list"]
    assert [each["name"] for each in variables] == ["datasource", "job", "instance"]
    for each in variables[1:]:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", each["query"]).groups()
        values = {series["metric"][label] for series in seen.prometheus.lately(selector)}
        assert label == each["name"]
        assert len(values) == 3, f"the daemon, the engine and vLLM, and not {values}"


def test_no_rule_fails_and_none_is_empty(seen: Observed) -> None:
    rules = [rule for group in seen.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {
        *(recording.record for recording in RECORDINGS),
        *(alert.name for alert in ALERTS),
    }
    for rule in rules:
        assert rule["health"] == "ok", rule
        if rule["type"] == "recording":
            series = seen.prometheus.lately(rule["name"])
            told = {
                each["metric"].get("job")
                for each in series
                if any(math.isfinite(float(value)) for _, value in each["values"])
            }
            assert told, f"{rule['name']} is empty: {series}"
            if rule["name"].startswith("instance"):
                assert ("vllm" in told) == ("vllm:" in rule["query"]), f"{rule['name']} of {told}"


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_what_an_alert_looks_at_is_there(seen: Observed, alert: Any) -> None:
    series = r"\b(?:vllm:\w+|(?:\w+:)?(?:kvtier|process|time)_\w+(?::\w+)?)(?:\{.*?\})?"
    names = set(re.findall(series, alert.expr))
    assert names
    for name in names:
        assert seen.prometheus.lately(name), f"{alert.name} looks at {name}, and there is none"


def test_the_figures_are_those_of_the_product(seen: Observed) -> None:
    """What the rules say, against what the daemon says of itself."""
    prometheus = seen.prometheus

    def value(rule: str) -> float:
        return float(prometheus.lately(rule)[0]["values"][-1][1])

    prefix = "instance:kvtier_prefix_cache"
    hit, miss = (value(f"{prefix}_{kind}_tokens:rate5m") for kind in ("hit", "miss"))
    assert hit > 0 < miss
    assert value(f"{prefix}_hit:ratio_rate5m") == pytest.approx(hit / (hit + miss), rel=0.2)
    capacity = seen.node.stat()["tiers"]["cpu"]["capacity_bytes"]
    assert 0 < value("instance:kvtier_cpu_kv_bytes:sum") <= capacity


def test_a_daemon_that_stands_still_is_missed_until_it_goes_on(seen: Observed) -> None:
    def missed() -> dict[str, str]:
        alerts = seen.prometheus.ask("alerts")["alerts"]
        return {each["labels"]["alertname"]: each["annotations"]["summary"] for each in alerts}

    with seen.daemon.stopped():
        await_true(lambda: "KvtierDaemonDown" in missed(), "the alert is pending", 30)
        where = f"127.0.0.1:{seen.node.http_port}"
        assert missed()["KvtierDaemonDown"] == f"The kvtier daemon at {where} is down"
        assert "KvtierEngineDown" not in missed()
    await_true(lambda: "KvtierDaemonDown" not in missed(), "the alert is gone", 30)
