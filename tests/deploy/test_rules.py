"""The rules: that they are what their source says, that alerts fire on harm, and only on it."""

import re
import runpy
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.source import vllm
from deploy.source.alert import ALERTS
from deploy.source.board import Board
from deploy.source.files import BOARDS, files
from deploy.source.query import RULE
from deploy.source.recording import FOUND_SHARE
from kvtier.connectors.vllm import stats
from kvtier.observe.daemon_metrics import (
    CERTIFICATE_NOT_BEFORE,
    DAEMON_METRICS,
    EVICTED_BLOCKS,
    LOOKUP_SECONDS,
    MISSED_BLOCKS,
    QUARANTINED_BLOCKS,
    TIER_UP,
)
from kvtier.observe.engine_metrics import (
    ENGINE_METRICS,
    POOL_BLOCKS,
)
from tests.deploy.replayed import VLLM_PAGE, assert_tells
from tests.programs import requires

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


def test_vllm_tells_what_is_asked_of_it() -> None:
    assert_tells(VLLM_PAGE.read_text(), vllm.ROWS)
    assert stats.ROWS.keys() <= {row.name.removesuffix("_total") for row in vllm.ROWS}


def test_nothing_else_is_asked_of_it() -> None:
    asked = {name for text in FILES.values() for name in re.findall(r"\bvllm:\w+", text)}
    parts = {"bucket", "sum", "count"}
    known = {row.name for row in vllm.ROWS}
    assert {re.sub(rf"_({'|'.join(parts)})$", "", name) for name in asked} == known


def test_every_metric_is_on_a_dashboard() -> None:
    text = "".join(text for name, text in FILES.items() if name.endswith(".json"))
    missing = {
        metric.name
        for metric in (*DAEMON_METRICS, *ENGINE_METRICS, *vllm.ROWS)
        if not re.search(rf"\b{metric.name}(_sum|_bucket)?\b", text)
    }
    # Each is there in a form that says more: the state, bytes, and how long it still holds.
    assert missing == {TIER_UP.name, POOL_BLOCKS.name, CERTIFICATE_NOT_BEFORE.name}


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
STARTED = "process_start_time_seconds"
QUARANTINED = 'kvtier_quarantined_blocks_total{tier="ssd"}'
FAULTS = 'kvtier_background_faults_total{task="scrub"}'
REFUSED = "kvtier_refused_samples_total"
UNUSABLE = 'kvtier_secret_refused{secret="rpc_token"}'
CONDEMNED = 'kvtier_miss_blocks_total{tier="cpu",reason="checksum"}'
VLLM = 'engine="0",model_name="m"'
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


def storm(found: float, first_token: float, scale: float = 1) -> dict[str, str]:
    """Of a hundred blocks in each minute; it turns in the last 45 of 120 minutes."""
    turn = 75
    block = 64 * scale
    return {
        "kvtier_asked_tokens_total": growing(100 * block),
        'kvtier_found_tokens_total{tier="cpu"}': since(turn, 90 * block, found * block),
        'kvtier_lookup_blocks_total{outcome="miss",tier="none"}': growing(100 * scale),
        'kvtier_missed_blocks_total{fate="evicted"}': since(turn, scale, 30 * scale),
        'kvtier_time_to_first_token_seconds_sum{instance="engine"}': since(turn, 10, first_token),
        'kvtier_time_to_first_token_seconds_count{instance="engine"}': growing(10),
    }


def loads(num_loads: float, late_share: float) -> dict[str, str]:
    """In each minute, of a thousand tokens each."""
    return {
        'kvtier_decisions_total{reason="all"}': growing(num_loads),
        "kvtier_ordered_tokens_total": growing(1000 * num_loads),
        'kvtier_unloaded_tokens_total{reason="late"}': growing(1000 * num_loads * late_share),
        'kvtier_unloaded_tokens_total{reason="released"}': growing(600 * num_loads),
    }


def stall(seconds: float, num_requests: float, waits_for: str = "load") -> dict[str, str]:
    """Seconds in each minute, and how many requests there are at once."""
    return {
        f'kvtier_restore_stall_seconds_total{{waits_for="{waits_for}"}}': growing(seconds),
        "kvtier_requests_loading": steady(num_requests if waits_for == "load" else 0),
        "kvtier_requests_waiting": steady(num_requests if waits_for == "lookup" else 0),
        "kvtier_requests_running": steady(0),
    }


def attached(attached: int, tokens: float) -> dict[str, str]:
    """Tokens in each minute."""
    return {
        f"vllm:kvtier_attached{{{VLLM}}}": steady(attached),
        f"vllm:generation_tokens_total{{{VLLM}}}": growing(tokens),
    }


def lookups(num_lookups: float, failed_share: float) -> dict[str, str]:
    """In each minute, of each of two engines of one server."""
    counts = {"failed": failed_share, "miss": 1 - failed_share}
    return {
        f'vllm:kvtier_lookups_total{{engine="{engine}",outcome="{outcome}"}}': growing(
            num_lookups * share
        )
        for engine in (0, 1)
        for outcome, share in counts.items()
    }


def missing(num_blocks: float, num_loads: float) -> dict[str, str]:
    """In each minute."""
    return {
        f"vllm:kvtier_missing_blocks_total{{{VLLM}}}": growing(num_blocks),
        f"vllm:kvtier_load_seconds_count{{{VLLM}}}": growing(num_loads),
    }


def waits(seconds: float, num_blocks: float, route: str = "ssd_to_cpu") -> dict[str, str]:
    """Of each block, and blocks in each minute."""
    name = "kvtier_transfer_queue_seconds"
    return {
        f'{name}_sum{{route="{route}"}}': growing(seconds * num_blocks),
        f'{name}_count{{route="{route}"}}': growing(num_blocks),
    }


def fleet(num_up: int, num_down: int) -> dict[str, str]:
    """Daemons that were all up, and have told their pins, for half an hour."""
    up = [1] * num_up + [0] * num_down
    series = {f'up{{instance="{n}"}}': f"1x30 {value}x{END}" for n, value in enumerate(up)}
    return series | {f'kvtier_pins{{instance="{n}"}}': "0x30" for n in range(len(up))}


def certificate(days: float, left_days: float) -> dict[str, str]:
    """One for so many days, of which so many are left after two hours."""
    until = 7200 + left_days * 86_400
    name, labels = "kvtier_certificate_not", '{secret="rpc_certificate"}'
    return {
        f"{name}_after_timestamp_seconds{labels}": steady(until),
        f"{name}_before_timestamp_seconds{labels}": steady(until - days * 86_400),
    }


def unused(loaded: str) -> dict[str, str]:
    ran = {"kvtier_ready": steady(1), STARTED: steady(-1e6)}
    return ran | {STORED: growing(1e8), LOADED: loaded}


def wear(written: float, read_back: str, capacity: str) -> dict[str, str]:
    ran = {STARTED: steady(-1e6)}
    return ran | {WRITTEN: growing(written), READ_BACK: read_back, CAPACITY: capacity}


def vanished(marker: str, up: int) -> dict[str, str]:
    return {"up": f"1x30 {up}x{END}", marker: "0x30"}


CASES: Mapping[str, Case] = {
    "KvtierDaemonsDown": Case(fleet(3, 2), fleet(8, 2)),
    "KvtierDaemonDown": Case(vanished("kvtier_pins", 0), vanished("kvtier_requests_running", 0)),
    "KvtierEngineDown": Case(vanished("kvtier_requests_running", 0), vanished("kvtier_pins", 0)),
    "KvtierLoopStuck": Case(
        {"kvtier_loop_silent_seconds": "0.5x110 12+60x9"},
        {"kvtier_loop_silent_seconds": "0.5x108 12 0.5x9 12"},
    ),
    "KvtierRestarts": Case(
        {STARTED: "1x80 2x9 3x9 4x30", "kvtier_build_info": steady(1)},
        {STARTED: "1x90 2x9 3x30", "kvtier_build_info": steady(1)},
    ),
    "KvtierNotReady": Case({"kvtier_ready": steady(0)}, {"kvtier_ready": "1x111 0x9"}),
    "KvtierEngineDetached": Case({"kvtier_attached": steady(0)}, {"kvtier_attached": steady(1)}),
    "KvtierVllmDetached": Case(attached(0, tokens=100), attached(1, tokens=100)),
    "KvtierVllmLookupsFail": Case(lookups(2, failed_share=0.3), lookups(2, failed_share=0.1)),
    "KvtierVllmBlocksMissing": Case(missing(5, num_loads=4), missing(5, num_loads=6)),
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
    "KvtierLoadsFail": Case(loads(2, late_share=0.3), loads(2, late_share=0.1)),
    "KvtierReadsWait": Case(waits(1.2, num_blocks=50), waits(0.8, num_blocks=50)),
    "KvtierRestoreStall": Case(stall(12, num_requests=3), stall(3, num_requests=3)),
    "KvtierStoresWithoutLoads": Case(unused(steady(0)), unused(growing(1e6)), minutes=END),
    "KvtierWriteBudgetUsedUp": Case(
        {'kvtier_ssd_write_budget_state{state="used_up"}': steady(1)},
        {'kvtier_ssd_write_budget_state{state="left"}': steady(1)},
    ),
    "KvtierSsdWear": Case(
        wear(1e9, growing(1e6), steady(5e10)), wear(1e9, growing(5e8), steady(5e10)), minutes=240
    ),
    "KvtierCorruptionFound": Case({QUARANTINED: "0x110 1x10"}, {QUARANTINED: steady(3)}),
    "KvtierPinsAtIdle": Case(
        {"kvtier_pins": steady(4), "kvtier_lookup_seconds_count": steady(900)},
        {"kvtier_pins": steady(4), "kvtier_lookup_seconds_count": growing(60)},
    ),
    "KvtierBackgroundFaults": Case({FAULTS: "0x110 3x10"}, {FAULTS: "0x110 2x10"}),
    "KvtierCertificateExpires": Case(certificate(90, 13), certificate(1, 0.3)),
    "KvtierSecretRefused": Case({UNUSABLE: steady(1)}, {UNUSABLE: f"0x60 1x10 0x{END}"}),
    "KvtierSamplesRefused": Case({REFUSED: "0x110 5x10"}, {REFUSED: steady(0)}),
}

HARM_TOO: Mapping[str, Mapping[str, str]] = {
    "KvtierCorruptionFound, before the first scrape": {
        QUARANTINED: "_x100 1x20",
        STARTED: "_x100 5950x20",
    },
    "KvtierCorruptionFound, once in each of two runs": {
        QUARANTINED: "0x20 1x79 1x20",
        STARTED: "-1e6x99 5950x20",
    },
    "KvtierCorruptionFound, in memory": {CONDEMNED: "0x110 1x10"},
    "KvtierCorruptionFound, in memory before the first scrape": {
        CONDEMNED: "_x100 1x20",
        STARTED: "_x100 5950x20",
    },
    "KvtierDaemonDown, that never answered": {'up{job="kvtier"}': f"_x95 0x{END}"},
    "KvtierDaemonsDown, that never answered": {
        'up{job="kvtier",instance="a"}': f"_x90 0x{END}",
        'up{job="kvtier",instance="b"}': f"_x90 0x{END}",
        'up{job="kvtier",instance="c"}': f"_x90 1x{END}",
    },
    "KvtierVllmBlocksMissing, and no load ends": missing(5, num_loads=0),
    "KvtierReadsWait, for Redis": waits(1.2, num_blocks=50, route="remote_to_cpu"),
    "KvtierRestoreStall, by lookups": stall(12, num_requests=3, waits_for="lookup"),
}

NO_HARM_EITHER: Mapping[str, Case] = {
    "KvtierDaemonDown, of one that starts": Case({}, {'up{job="kvtier"}': "_x106 0x10 1x20"}),
    "KvtierDaemonsDown, of one alone": Case({}, fleet(0, 1)),
    "KvtierVllmDetached, as of its last step": Case({}, attached(0, tokens=0)),
    "KvtierVllmLookupsFail, of a few": Case({}, lookups(0.5, failed_share=0.9)),
    "KvtierVllmBlocksMissing, of a few": Case({}, missing(1, num_loads=0)),
    "KvtierReadsWait, of a few": Case({}, waits(1.2, num_blocks=5)),
    "KvtierReadsWait, to be written": Case({}, waits(9, num_blocks=50, route="cpu_to_ssd")),
    "KvtierCorruptionFound, gone meanwhile": Case(
        {}, {'kvtier_miss_blocks_total{tier="cpu",reason="late"}': "0x110 9x10"}
    ),
    "KvtierRestarts, of something else": Case({}, {STARTED: "1x80 2x9 3x9 4x30"}),
    "KvtierEvictionStorm, of a few": Case({}, storm(found=50, first_token=20, scale=0.1)),
    "KvtierLoadsFail, of a few": Case({}, loads(0.2, late_share=0.3)),
    "KvtierRestoreStall, of one user": Case({}, stall(12, num_requests=1)),
    "KvtierCorruptionFound, long ago": Case({}, {QUARANTINED: steady(3), STARTED: steady(0)}),
    "KvtierSsdWear, of a tier taken off": Case({}, wear(1e9, steady(0), f"5e11x30 0x{END}"), 240),
    "KvtierSsdWear, of a small tier": Case({}, wear(1e8, steady(0), steady(1e10)), 240),
    # What was read of a counter before a restart, and some time after, may be the same.
    "KvtierSsdWear, begun anew unseen": Case(
        {},
        wear(1e9, f"1e12x60 _x60 1e12x{END}", steady(5e10)) | {STARTED: "-1e6x60 _x60 5e3x360"},
        240,
    ),
    "KvtierStoresWithoutLoads, begun anew unseen": Case(
        {},
        unused(f"1e12x200 _x60 1e12x{END}") | {STARTED: "-1e6x200 _x60 14e3x360"},
        END,
    ),
}
"""By alert, and by what else is harm, or nearly so."""

AWAY, RESTARTED, BACK, LAST = 120, 150, 330, 720
"""In minutes: when Prometheus was last there before and first after, and the node's restart."""

STEADY: Mapping[str, float] = {
    "up": 1,
    "kvtier_ready": 1,
    "kvtier_attached": 1,
    "kvtier_build_info": 1,
    "kvtier_pins": 4,
    "kvtier_loop_silent_seconds": 0.5,
    "kvtier_requests_loading": 3,
    "kvtier_requests_waiting": 3,
    "kvtier_requests_running": 3,
    CAPACITY: 5e10,
    f"vllm:kvtier_attached{{{VLLM}}}": 1,
}
GROWING: Mapping[str, float] = {
    "kvtier_asked_tokens_total": 6400,
    "kvtier_lookup_seconds_count": 10,
    "kvtier_ordered_tokens_total": 5000,
    'kvtier_decisions_total{reason="all"}': 5,
    'kvtier_found_tokens_total{tier="cpu"}': 5800,
    'kvtier_lookup_blocks_total{outcome="hit",tier="cpu"}': 100,
    'kvtier_lost_seconds_total{tier="ssd"}': 1,
    'kvtier_missed_blocks_total{fate="evicted"}': 8,
    'kvtier_regret_seconds_total{taken="restore"}': 1,
    'kvtier_restore_stall_seconds_total{waits_for="load"}': 4,
    'kvtier_saved_seconds_total{tier="ssd"}': 20,
    'kvtier_time_to_first_token_seconds_count{source="ssd"}': 10,
    'kvtier_time_to_first_token_seconds_sum{source="ssd"}': 10,
    'kvtier_unloaded_tokens_total{reason="late"}': 500,
    f"vllm:generation_tokens_total{{{VLLM}}}": 100,
    f'vllm:kvtier_lookups_total{{{VLLM},outcome="failed"}}': 1,
    f'vllm:kvtier_lookups_total{{{VLLM},outcome="hit"}}': 10,
    f"vllm:kvtier_load_seconds_count{{{VLLM}}}": 10,
    f"vllm:kvtier_missing_blocks_total{{{VLLM}}}": 5,
    'kvtier_transfer_queue_seconds_count{route="ssd_to_cpu"}': 50,
    'kvtier_transfer_queue_seconds_sum{route="ssd_to_cpu"}': 10,
    STORED: 1e8,
    LOADED: 1e8,
    WRITTEN: 1e9,
    READ_BACK: 5e8,
}
"""A busy node that is well: how it is, and what is counted in each minute."""

EVENTS: Mapping[str, float] = {FAULTS: 5, QUARANTINED: 2, CONDEMNED: 1, REFUSED: 1}
"""What had happened to it right after its restart: nobody looked, and it is long ago."""


def test_every_alert_has_its_case() -> None:
    assert list(CASES) == NAMES


@pytest.fixture(scope="module")
def promtool() -> str:
    return requires("promtool")


def test_the_files_are_rules(promtool: str) -> None:
    paths = sorted(ROOT.glob("deploy/prometheus/*.yml"))
    told = subprocess.run(
        [promtool, "check", "rules", *paths], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("SUCCESS") == 2


def group(name: str, series: Mapping[str, str], *looks: int, fires: bool) -> dict[str, Any]:
    """A test of promtool's: whether alerts of a name fire after so many minutes."""
    alert = _alert(name)
    wanted = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": "1m",
        "name": name,
        "input_series": [
            {"series": with_target(each), "values": values} for each, values in series.items()
        ],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname=~"{alert}", alertstate="firing"}})',
                "eval_time": f"{minutes}m",
                "exp_samples": wanted,
            }
            for minutes in looks
        ],
    }


def _alert(name: str) -> str:
    """Return the alert that a test is about, of the test's name."""
    return name.partition(",")[0]


def with_target(series: str) -> str:
    """Give a series the labels of a target, if it has none."""
    name, _, labels = series.rstrip("}").partition("{")
    target = {"job": "k", "instance": "node"}
    own = [f'{label}="{value}"' for label, value in target.items() if f"{label}=" not in labels]
    return f"{name}{{{','.join([*own, *filter(None, [labels])])}}}"


def prove(
    promtool: str, folder: Path, tests: Sequence[Mapping[str, Any]], rules: str = "*"
) -> None:
    """Have promtool run tests of the rules in such files."""
    file = folder / "alerts.test.yml"
    paths = [str(path) for path in sorted(ROOT.glob(f"deploy/prometheus/{rules}.yml"))]
    # A coarse interval: each minute of each case would cost a minute of CPU in all.
    document = {"rule_files": paths, "evaluation_interval": "5m", "tests": list(tests)}
    file.write_text(yaml.safe_dump(document))
    told = subprocess.run(
        [promtool, "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_alerts_fire_on_harm_and_only_on_harm(promtool: str, tmp_path: Path) -> None:
    harm = {name: (case.harm, case.minutes) for name, case in CASES.items()}
    harm |= {name: (series, 120) for name, series in HARM_TOO.items()}
    tests = [group(name, *case, fires=True) for name, case in harm.items()]
    tests += [
        group(name, case.healthy, case.minutes, fires=False)
        for name, case in (*CASES.items(), *NO_HARM_EITHER.items())
    ]
    # The recording rules are half of the work, and one alert looks at what they record.
    recorded = {alert.name for alert in ALERTS if FOUND_SHARE.record in alert.expr}
    for is_recorded, rules in ((True, "*"), (False, "alerts")):
        some = [each for each in tests if (_alert(each["name"]) in recorded) == is_recorded]
        prove(promtool, tmp_path, some, rules)


def seen(before: str, after: str, *, was_away: bool) -> str:
    """What a Prometheus has of a series that was away, or that is new and so has nothing before."""
    return f"{before if was_away else '_'}x{AWAY} _x{BACK - AWAY - 1} {after}x{LAST - BACK}"


@pytest.mark.slow
@pytest.mark.parametrize("was_away", [True, False], ids=["away", "new"])
def test_nothing_fires_because_nobody_looked_for_hours(
    promtool: str, tmp_path: Path, was_away: bool
) -> None:
    begun = BACK - RESTARTED
    series = {name: (f"{value:g}", f"{value:g}") for name, value in STEADY.items()}
    series |= {name: (f"0+{v:g}", f"{v * begun:g}+{v:g}") for name, v in GROWING.items()}
    series |= {name: ("0", f"{value:g}") for name, value in EVENTS.items()}
    series[STARTED] = ("-1e6", f"{RESTARTED * 60}")
    known = {name: seen(*parts, was_away=was_away) for name, parts in series.items()}
    looks = range(BACK, LAST, 10)
    prove(promtool, tmp_path, [group("Kvtier.+", known, *looks, fires=False)])


@pytest.mark.slow
def test_what_is_counted_in_an_hour_and_of_whom(promtool: str, tmp_path: Path) -> None:
    first_tokens = "vllm:time_to_first_token_seconds_count"
    series = {
        'kvtier_quarantined_blocks_total{instance="new",tier="ssd"}': "_x100 3x20",
        'process_start_time_seconds{instance="new"}': "_x100 5950x20",
        'kvtier_quarantined_blocks_total{instance="old",tier="ssd"}': "5x110 7x10",
        'process_start_time_seconds{instance="old"}': "0x120",
        'vllm:kvtier_attached{instance="with"}': "1x120",
        f'{first_tokens}{{instance="with"}}': "0+60x120",
        f'{first_tokens}{{instance="without"}}': "0+600x120",
    }
    hour = RULE.in_an_hour(QUARANTINED_BLOCKS)
    rate = RULE.rate(vllm.TIME_TO_FIRST_TOKEN_SECONDS, "count")
    wanted = {f"round(sum({hour}))": 5, f"round(sum({rate}))": 1}
    test = {
        "interval": "1m",
        "input_series": [{"series": with_target(each), "values": v} for each, v in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": "2h", "exp_samples": [{"labels": "{}", "value": value}]}
            for expr, value in wanted.items()
        ],
    }
    prove(promtool, tmp_path, [test])
