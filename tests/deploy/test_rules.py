"""The rules: that they are what their source says, that alerts fire on harm, and only on it."""

import re
import runpy
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.source.alert import ALERTS
from deploy.source.board import Board
from deploy.source.files import BOARDS, files
from deploy.source.query import RULE
from kvtier.observe.table import (
    DAEMON_METRICS,
    ENGINE_METRICS,
    EVICTED_BLOCKS,
    LOOKUP_SECONDS,
    MISSED_BLOCKS,
    POOL_BLOCKS,
    TIER_UP,
)

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "operations" / "runbook.md").read_text()
FILES = files()
NAMES = [alert.name for alert in ALERTS]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_what_its_source_says(name: str) -> None:
    assert (ROOT / name).read_text() == FILES[name], f"{name} is stale; run make docs"


def test_nothing_else_lies_beside_them() -> None:
    there = [*ROOT.glob("deploy/prometheus/*"), *ROOT.glob("deploy/grafana/*")]
    assert {path.relative_to(ROOT).as_posix() for path in there} <= FILES.keys()


def test_they_can_be_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["deploy", "--out", str(tmp_path), "--runbook", "https://wiki.example/kvtier"]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_module("deploy.source", run_name="__main__")
    for name in ("deploy/prometheus/alerts.yml", "deploy/grafana/overview.json"):
        text = (tmp_path / name).read_text()
        assert "https://wiki.example/kvtier#kvtierrestoresslowerthanrecompute" in text
        assert "docs/operations/runbook.md" not in text


def test_every_metric_is_on_a_dashboard() -> None:
    text = "".join(text for name, text in FILES.items() if name.endswith(".json"))
    missing = {
        metric.name
        for metric in (*DAEMON_METRICS, *ENGINE_METRICS)
        if not re.search(rf"\b{metric.name}(_sum|_bucket)?\b", text)
    }
    # Each is there in a form that says more: the state, and bytes.
    assert missing == {TIER_UP.name, POOL_BLOCKS.name}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_fill_their_rows_and_say_what_they_show(board: Board) -> None:
    for section in board.sections:
        at = 0
        for panel in section.panels:
            at = at % 24 + panel.span
            assert at <= 24, f"{panel.title} stands out"
            assert panel.description.endswith("."), panel.title
            assert not panel.alert or panel.alert in NAMES, panel.title
        assert at == 24, f"{section.title} has a gap"
    titles = [panel.title for section in board.sections for panel in section.panels]
    assert len(titles) == len(set(titles))


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_has_its_section_in_the_runbook(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    assert section, f"docs/operations/runbook.md says nothing of {name}"
    for word in ("Means", "Look", "Do"):
        assert f"**{word}.**" in section[1], f"the section of {name} has no {word}"


def test_the_runbook_has_no_section_too_many() -> None:
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == NAMES


@pytest.mark.parametrize(
    ("labels", "part"),
    [({"tier": "tape"}, ""), ({"level": "cpu"}, ""), ({}, "bucket")],
    ids=["value", "label", "part"],
)
def test_a_query_cannot_name_what_is_not_exposed(labels: dict[str, str], part: str) -> None:
    with pytest.raises(AssertionError, match="kvtier_evicted_blocks_total has no"):
        RULE.series(EVICTED_BLOCKS, part, **labels)
    with pytest.raises(AssertionError, match="kvtier_lookup_seconds has no"):
        RULE.series(LOOKUP_SECONDS)
    assert RULE.series(MISSED_BLOCKS, fate=("cost", "salt")).endswith('{fate=~"cost|salt"}')


@dataclass(frozen=True)
class Case:
    """What an alert sees, a minute a value: harm, and what is nearly that and is none."""

    harm: Mapping[str, str]
    healthy: Mapping[str, str]
    minutes: int = 120
    """When it is looked at: after its windows, and what it is held for."""


END = 480
"""Of every series, in minutes; whoever is looked at earlier does not see the rest."""

STORED = 'kvtier_transfer_bytes_total{route="gpu_to_cpu",outcome="complete"}'
LOADED = 'kvtier_transfer_bytes_total{route="cpu_to_gpu",outcome="complete"}'
READ_BACK = 'kvtier_transfer_bytes_total{route="ssd_to_cpu",outcome="complete"}'
WRITTEN = 'kvtier_ssd_written_bytes_total{kind="blocks"}'
CAPACITY = 'kvtier_tier_capacity_bytes{tier="ssd"}'


def steady(value: float) -> str:
    return f"{value:g}x{END}"


def growing(step: float) -> str:
    return f"0+{step:g}x{END}"


def since(turn: int, before: float, after: float) -> str:
    """A counter whose growth changes after ``turn`` minutes."""
    return f"0+{before:g}x{turn} {before * turn:g}+{after:g}x{END - turn}"


def worth(saved: float, lost: float, regret: float = 0.0) -> dict[str, str]:
    """Seconds in each minute."""
    return {
        'kvtier_saved_seconds_total{tier="ssd"}': growing(saved),
        'kvtier_lost_seconds_total{tier="ssd"}': growing(lost),
        'kvtier_regret_seconds_total{taken="restore"}': growing(regret),
    }


def storm(found: float, first_token: float) -> dict[str, str]:
    """Of a hundred blocks in each minute; it turns in the last 45 of 120 minutes."""
    turn = 75
    return {
        "kvtier_asked_tokens_total": growing(6400),
        'kvtier_found_tokens_total{tier="cpu"}': since(turn, 64 * 90, 64 * found),
        'kvtier_lookup_blocks_total{outcome="miss",tier="none"}': growing(100),
        'kvtier_missed_blocks_total{fate="evicted"}': since(turn, 1, 30),
        'kvtier_time_to_first_token_seconds_sum{instance="engine"}': since(turn, 10, first_token),
        'kvtier_time_to_first_token_seconds_count{instance="engine"}': growing(10),
    }


def vanished(marker: str, up: int) -> dict[str, str]:
    return {"up": f"1x30 {up}x{END}", marker: "0x30"}


CASES: Mapping[str, Case] = {
    "KvtierDaemonDown": Case(vanished("kvtier_pins", 0), vanished("kvtier_requests_running", 0)),
    "KvtierEngineDown": Case(vanished("kvtier_requests_running", 0), vanished("kvtier_pins", 0)),
    "KvtierRestarts": Case(
        {"process_start_time_seconds": "1x80 2x9 3x9 4x30", "kvtier_build_info": steady(1)},
        {"process_start_time_seconds": "1x90 2x9 3x30", "kvtier_build_info": steady(1)},
    ),
    "KvtierNotReady": Case({"kvtier_ready": steady(0)}, {"kvtier_ready": "1x111 0x9"}),
    "KvtierEngineDetached": Case({"kvtier_attached": steady(0)}, {"kvtier_attached": steady(1)}),
    "KvtierTierOut": Case(
        {'kvtier_tier_state{tier="ssd",state="out"}': steady(1)},
        {
            'kvtier_tier_state{tier="ssd",state="out"}': steady(0),
            'kvtier_tier_state{tier="ssd",state="off"}': steady(1),
        },
    ),
    "KvtierTierDegraded": Case(
        {'kvtier_tier_state{tier="cpu",state="degraded"}': steady(1)},
        {'kvtier_tier_state{tier="cpu",state="degraded"}': "0x100 1x20"},
    ),
    "KvtierTierGuarded": Case(
        {'kvtier_tier_guarded{tier="remote"}': "1 1 1 0 " * 30},
        {'kvtier_tier_guarded{tier="remote"}': "0 0 0 1 " * 30},
    ),
    "KvtierEvictionStorm": Case(storm(found=50, first_token=20), storm(found=50, first_token=10)),
    "KvtierRestoresSlowerThanRecompute": Case(worth(saved=1, lost=2), worth(saved=2, lost=1)),
    "KvtierWrongDecisions": Case(worth(2, 0, regret=1.5), worth(20, 0, regret=1.5)),
    "KvtierLoadsFail": Case(
        {
            "kvtier_ordered_tokens_total": growing(1000),
            'kvtier_unloaded_tokens_total{reason="late"}': growing(300),
        },
        {
            "kvtier_ordered_tokens_total": growing(1000),
            'kvtier_unloaded_tokens_total{reason="late"}': growing(100),
            'kvtier_unloaded_tokens_total{reason="released"}': growing(600),
        },
    ),
    "KvtierRestoreStall": Case(
        {'kvtier_restore_stall_seconds_total{waits_for="load"}': growing(12)},
        {'kvtier_restore_stall_seconds_total{waits_for="load"}': growing(3)},
    ),
    "KvtierStoresWithoutLoads": Case(
        {STORED: growing(1e8), LOADED: growing(0), "kvtier_ready": steady(1)},
        {STORED: growing(1e8), LOADED: growing(1e6), "kvtier_ready": steady(1)},
        minutes=END,
    ),
    "KvtierWriteBudgetUsedUp": Case(
        {'kvtier_ssd_write_budget_state{state="used_up"}': steady(1)},
        {'kvtier_ssd_write_budget_state{state="left"}': steady(1)},
    ),
    "KvtierSsdWear": Case(
        {WRITTEN: growing(1e9), READ_BACK: growing(1e6), CAPACITY: steady(5e10)},
        {WRITTEN: growing(1e9), READ_BACK: growing(5e8), CAPACITY: steady(5e10)},
    ),
    "KvtierCorruptionFound": Case(
        {'kvtier_quarantined_blocks_total{tier="ssd"}': "0x110 1x10"},
        {'kvtier_quarantined_blocks_total{tier="ssd"}': steady(3)},
    ),
    "KvtierPinsAtIdle": Case(
        {"kvtier_pins": steady(4), "kvtier_lookup_seconds_count": steady(900)},
        {"kvtier_pins": steady(4), "kvtier_lookup_seconds_count": growing(60)},
    ),
    "KvtierBackgroundFaults": Case(
        {'kvtier_background_faults_total{task="scrub"}': "0x110 2x10"},
        {'kvtier_background_faults_total{task="scrub"}': steady(2)},
    ),
    "KvtierSamplesRefused": Case(
        {"kvtier_refused_samples_total": "0x110 5x10"},
        {"kvtier_refused_samples_total": steady(0)},
    ),
}

NO_HARM_EITHER: Mapping[str, Case] = {
    "KvtierRestarts, of something else": Case(
        {}, {"process_start_time_seconds": "1x80 2x9 3x9 4x30"}
    ),
    "KvtierSsdWear, taken off": Case(
        {}, {WRITTEN: growing(1e8), READ_BACK: growing(0), CAPACITY: f"5e10x30 0x{END}"}
    ),
}
"""By alert, and by what else is nearly harm."""


def test_every_alert_has_its_case() -> None:
    assert list(CASES) == NAMES


@pytest.fixture(scope="module")
def promtool() -> str:
    program = shutil.which("promtool")
    assert program, "no promtool is installed; .ci/run says which package has it"
    return program


def test_the_files_are_rules(promtool: str) -> None:
    paths = sorted(ROOT.glob("deploy/prometheus/*.yml"))
    told = subprocess.run(
        [promtool, "check", "rules", *paths], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("SUCCESS") == 2


def group(name: str, series: Mapping[str, str], minutes: int, *, fires: bool) -> dict[str, Any]:
    """A test of promtool's: whether one alert fires at the end, over all its labels."""
    firing = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    return {
        "interval": "1m",
        "name": f"{name} {'harm' if fires else 'healthy'}",
        "input_series": [
            {"series": with_target(each), "values": values} for each, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": firing,
                "eval_time": f"{minutes}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def with_target(series: str) -> str:
    """Give a series the labels of a target, if it has none."""
    name, _, labels = series.rstrip("}").partition("{")
    target = 'job="k"' if "instance=" in labels else 'job="k",instance="node"'
    return f"{name}{{{target}{',' if labels else ''}{labels}}}"


@pytest.mark.slow
def test_alerts_fire_on_harm_and_only_on_harm(promtool: str, tmp_path: Path) -> None:
    tests = [
        group(name, series, case.minutes, fires=fires)
        for name, case in CASES.items()
        for series, fires in ((case.harm, True), (case.healthy, False))
    ]
    tests += [
        group(name.partition(",")[0], case.healthy, case.minutes, fires=False)
        for name, case in NO_HARM_EITHER.items()
    ]
    file = tmp_path / "alerts.test.yml"
    paths = [str(path) for path in sorted(ROOT.glob("deploy/prometheus/*.yml"))]
    # A coarse interval: each minute of each case would cost a minute of CPU in all.
    document = {"rule_files": paths, "evaluation_interval": "5m", "tests": tests}
    file.write_text(yaml.safe_dump(document))
    told = subprocess.run(
        [promtool, "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
