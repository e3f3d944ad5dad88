"""What the connector counts and says, without vLLM and inside of each release."""

import io
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvtier.connectors.vllm.stats import (
    ATTACHED,
    HIT_TOKENS,
    LOAD_SECONDS,
    LOOKUPS,
    ROWS,
    STORE_BLOCKS,
    StatCounters,
    StatKind,
    add_up,
    split_by_tier,
    summary,
)
from kvtier.connectors.vllm_common.observability import join_log
from kvtier.connectors.vllm_common.settings import read_settings
from kvtier.core.residency import TierName
from kvtier.errors import ConfigError
from kvtier.observe.log import Log

ROOT = Path(__file__).resolve().parent.parent.parent
RELEASES = os.environ.get("KVTIER_VLLM", "").split()
CPU, SSD, REMOTE = TierName.CPU, TierName.SSD, TierName.REMOTE


def test_a_tally_is_taken_once() -> None:
    counters = StatCounters()
    counters.add(HIT_TOKENS, 64, "cpu")
    counters.add(HIT_TOKENS, 64, "cpu")
    counters.add(STORE_BLOCKS, 0, "kept")
    assert counters.take() == {HIT_TOKENS.name: {"cpu": [128]}}
    assert counters.take() == {}


def test_counts_are_added_up_by_their_kind() -> None:
    one, other = StatCounters(), StatCounters()
    for counters, is_attached in ((one, 1), (other, 0)):
        counters.add(ATTACHED, is_attached)
        counters.add(LOOKUPS, label="hit")
        counters.add(LOAD_SECONDS, 0.002 + is_attached)
    counts, later = one.take(), other.take()
    add_up(counts, later)
    assert counts == {
        ATTACHED.name: {"": [0]},
        LOOKUPS.name: {"hit": [2]},
        LOAD_SECONDS.name: {"": [1.002, 0.002]},
    }
    assert later[LOAD_SECONDS.name] == {"": [0.002]}, "what is added stays as it was"


def test_what_another_release_of_ours_counts_is_left_out() -> None:
    counts = StatCounters().take()
    add_up(counts, {"vllm:kvtier_of_tomorrow": {"": [1]}})
    assert counts == {}


def test_samples_that_nobody_takes_are_bounded() -> None:
    counters = StatCounters()
    for _ in range(3000):
        counters.add(LOAD_SECONDS, 0.001)
    counts = counters.take()
    add_up(counts, counts)
    assert len(counts[LOAD_SECONDS.name][""]) == 1000


def test_an_interval_reads_well() -> None:
    counters = StatCounters()
    counters.add(HIT_TOKENS, 2944, "ssd")
    counters.add(LOOKUPS, 2, "hit")
    for seconds in (0.010, 0.0203):
        counters.add(LOAD_SECONDS, seconds)
    counters.add(STORE_BLOCKS, 3, "kept")
    assert summary(counters.take()) == {
        "Tokens from ssd": 2944,
        "Lookups hit": 2,
        "Avg load (ms)": 15.2,
        "Max load (ms)": 20.3,
        "Blocks kept": 3,
    }
    assert summary({}) == {}


@pytest.mark.parametrize(
    ("tiers", "num_tokens", "wanted"),
    [
        ([CPU, CPU], 128, {CPU: 128}),
        ([CPU, SSD, REMOTE], 192, {CPU: 64, SSD: 64, REMOTE: 64}),
        ([CPU, SSD], 80, {CPU: 16, SSD: 64}),  # of the first block vLLM has 48 tokens itself
        ([CPU, SSD], 64, {SSD: 64}),
        ([CPU], 0, {}),
        ([], 0, {}),
    ],
)
def test_tokens_are_split_by_tier(
    tiers: list[TierName], num_tokens: int, wanted: dict[TierName, int]
) -> None:
    assert split_by_tier(tiers, num_tokens, 64) == wanted
    assert sum(wanted.values()) == num_tokens


def test_the_guide_names_every_metric() -> None:
    guide = (ROOT / "docs" / "vllm.md").read_text()
    for row in ROWS.values():
        suffix = "_total" if row.kind is StatKind.COUNTER else ""
        assert f"| `{row.name}{suffix}` |" in guide, row.name
        for value in filter(None, row.values):
            assert f"`{value}`" in guide, f"{row.name} {value}"


def test_the_guide_names_every_key() -> None:
    guide = (ROOT / "docs" / "vllm.md").read_text()
    with pytest.raises(ConfigError) as refused:
        read_settings({"zzz": 1}, {})
    keys = refused.value.remedy.removeprefix("valid keys are ").split(", ")
    assert len(keys) >= 4
    assert not [key for key in keys if f"| `{key}` |" not in guide]


def test_the_short_name_is_an_entry_point() -> None:
    found = entry_points(group="vllm.general_plugins", name="kvtier")
    assert {point.value for point in found} == {"kvtier.connectors.vllm.plugin:register"}
    (point, *_) = found
    point.load()()  # there is no vLLM here, and nothing is raised


@pytest.fixture
def theirs(request: pytest.FixtureRequest) -> Iterator[io.StringIO]:
    """A logger as vLLM sets up its own, under a name of the test's."""
    stream = io.StringIO()
    target = logging.getLogger(f"vllm-of-{request.node.name}")
    output = logging.StreamHandler(stream)
    output.setFormatter(logging.Formatter("%(levelname)s [%(filename)s] %(message)s"))
    target.addHandler(output)
    target.setLevel(logging.INFO)
    target.propagate = False
    yield stream
    target.removeHandler(output)


def test_events_are_lines_among_those_of_vllm(
    theirs: io.StringIO, request: pytest.FixtureRequest
) -> None:
    name = f"ours-of-{request.node.name}"
    for _ in range(2):  # the two halves may be in one process
        join_log(name, f"vllm-of-{request.node.name}")
    log = Log(f"{name}.client")
    log.info("attached", socket="/run/a b")
    log.debug("not wanted")
    log.warning("100 % of it")
    try:
        raise KeyError("gone")
    except KeyError:
        log.exception("a hook failed", hook="load")
    lines = theirs.getvalue().splitlines()
    here = Path(__file__).name
    assert lines[:3] == [
        f'INFO [{here}] kvtier: attached socket="/run/a b"',
        f"WARNING [{here}] kvtier: 100 % of it",
        f"ERROR [{here}] kvtier: a hook failed hook=load",
    ]
    assert lines[3].startswith("Traceback")
    is_passed_on = logging.getLogger(name).propagate
    assert not is_passed_on, "the root would write each line once more"


def test_a_log_that_the_user_set_up_is_left_alone(
    theirs: io.StringIO, request: pytest.FixtureRequest
) -> None:
    own, name = io.StringIO(), f"ours-of-{request.node.name}"
    ours = logging.getLogger(name)
    ours.addHandler(logging.StreamHandler(own))
    join_log(name, f"vllm-of-{request.node.name}")
    Log(name).warning("no daemon")
    assert (own.getvalue(), theirs.getvalue()) == ("no daemon\n", "")


def test_a_level_that_the_user_set_is_kept(
    theirs: io.StringIO, request: pytest.FixtureRequest
) -> None:
    name = f"ours-of-{request.node.name}"
    logging.getLogger(name).setLevel(logging.ERROR)
    join_log(name, f"vllm-of-{request.node.name}")
    Log(name).warning("not wanted")
    assert not theirs.getvalue()


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
@pytest.mark.parametrize("release", RELEASES)
def test_counts_pass_through_the_classes_of_a_release(release: str) -> None:
    python = ROOT / ".vllm" / release / "bin" / "python"
    script = Path(__file__).with_name("in_vllm_stats.py")
    words = [str(python), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{re.escape(release)}\.\d+: ok$", done.stdout, re.MULTILINE), done.stdout
