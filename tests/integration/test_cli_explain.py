"""``kvtier explain``, ``kvtier probe``: what a person is told, by real processes."""

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.explain import explain_text
from kvtier.cli.main import main
from kvtier.cli.probe import probe_text
from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.daemon.status.explain import FATE_SENTENCES, PLAN_SENTENCES
from kvtier.testing.child import await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, complete

DECISION: dict[str, Any] = {
    "number": 42,
    "engine": "kvtier tiny\x1b[31m",
    "age_s": 3.25,
    "reason": "split",
    "sentence": "the end is restored while the beginning is computed, until they meet",
    "inputs": {
        "prompt_tokens": 6000,
        "first_token": 640,
        "block_tokens": 64,
        "block_bytes": 8 << 20,
        "found": [{"tier": "cpu", "blocks": 8}, {"tier": "ssd", "blocks": 40}],
        "found_reason": "absent",
        "sources": [
            {"tier": "cpu", "blocks": 8, "queued_bytes": 0},
            {"tier": "ssd", "blocks": 40, "queued_bytes": 64 << 20},
        ],
        "limit_blocks": 44,
        "can_split": True,
        "waiting_tokens": 1200,
        "running": 3,
    },
    "plan": {
        "blocks": 44,
        "split": True,
        "wait_s": 5.0,
        "restore_s": {"mean": 0.12, "p95": None},
        "recompute_s": {"mean": 1.4, "p95": 1.5},
        "first_token_s": 0.4,
        "first_token_by_recompute_s": 1.6,
    },
    "missed": [{"fate": "evicted", "blocks": 3, "sentence": FATE_SENTENCES[Fate.EVICTED]}],
    "outcome": {
        "restored": [{"tier": "cpu", "blocks": 8}, {"tier": "ssd", "blocks": 30}],
        "restore_s": 0.2,
        "computed_tokens": 2928,
        "compute_s": 0.5,
        "wait_s": 0.01,
        "first_token_s": 0.55,
    },
    "judgement": {
        "taken": "restore",
        "saved_s": {"cpu": 0.8, "ssd": 0.0},
        "lost_s": {"ssd": 0.1},
        "regret_s": 0.05,
        "cold_s": 1.99,
    },
    "model": None,
}
CHAIN: dict[str, Any] = {
    "key_space": "ab" * 16,
    "tenant": "",
    "block_tokens": 64,
    "blocks": 93,
    "tokens": 5952,
    "prompt_tokens": 6000,
    "tiers": {
        "cpu": {"blocks": 8, "runs": [[0, 8]], "more_runs": 0},
        "ssd": {"blocks": 40, "runs": [[2 * n, 1] for n in range(40)], "more_runs": 3},
        "remote": {"blocks": 0, "runs": [], "more_runs": 0},
    },
    "served": {
        "blocks": 8,
        "tokens": 512,
        "runs": [{"tier": "cpu", "blocks": 8}],
        "reason": "absent",
    },
    "missing": {
        "block": 8,
        "first_token": 512,
        "fate": "refused_worth",
        "sentence": FATE_SENTENCES[Fate.REFUSED_WORTH],
    },
}
PROMPT: dict[str, Any] = {
    "key_space": "ab" * 16,
    "tenant": "cd" * 16,
    "block_tokens": 64,
    "num_tokens": 6000,
    "is_seen": True,
    "nearest_tokens": 520,
    "has_nearest": True,
    "text": {"before": "the date is ", "here": "Monday\n", "there": "Tuesday\x07"},
}
DOCUMENT = {"request_id": "cmpl-1", "chain": CHAIN, "decision": DECISION, "prompt": PROMPT}


def check_shape(text: str) -> None:
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert all(line == line.rstrip() for line in lines)
    assert text.replace("\n", "").isprintable()


def test_the_whole_story_in_eighty_columns() -> None:
    text = explain_text(DOCUMENT)
    print(text)
    check_shape(text)
    for said in (
        "6,000 tokens: 93 full blocks of 64, tenant cdcdcdcd",
        "at token 520, in block 8",
        "'the date is │Monday\\n'",
        "'the date is │Tuesday\\x07'",
        "cpu         8: 0-7",
        "remote      none",
        "and 37 more runs",
        "from block 8, token 512",
        "(refused_worth)",
        "number 42, 3.25 s ago, for kvtier tiny?[31m",
        "64 MiB ahead of it at ssd",
        "44 blocks, set by the request",
        "load 44 blocks, last block first, wait at most 5 s",
        "loading takes 120 ms (P95 unknown)",
        "first token after 400 ms, by computing after 1.6 s",
        "3 blocks: evicted to make room for others (evicted)",
        "loaded cpu 8, ssd 30 in 200 ms",
        "cpu saved 800 ms; ssd cost 100 ms; computing would have saved 50 ms",
        "measured: computing this prompt took 1.99 s",
    ):
        assert said in " ".join(text.split()) or said in text, said


@pytest.mark.parametrize("fate", Fate)
def test_every_fate_is_told_in_words(fate: Fate) -> None:
    document = deepcopy(DOCUMENT)
    document["chain"]["missing"] |= {"fate": fate.value, "sentence": FATE_SENTENCES[fate]}
    text = explain_text(document)
    check_shape(text)
    assert f"({fate})" in text


@pytest.mark.parametrize("reason", PlanReason)
def test_every_reason_of_a_plan_is_told_in_words(reason: PlanReason) -> None:
    document = deepcopy(DOCUMENT)
    document["decision"] |= {
        "reason": reason.value,
        "sentence": PLAN_SENTENCES[reason],
        "outcome": None,
        "judgement": None,
        "missed": [],
    }
    document["decision"]["plan"]["blocks"] = 0
    text = explain_text(document)
    check_shape(text)
    assert f"({reason})" in text
    assert "compute everything" in text
    assert "not reported by the engine yet" in text


def test_what_is_not_known_is_said_to_be() -> None:
    text = explain_text({"request_id": "cmpl-\x1b1", "chain": None, "decision": None})
    assert text == "decision      none recorded for cmpl-?1"
    bare = {**PROMPT, "has_nearest": False, "is_seen": False, "tenant": "00" * 16, "num_tokens": 9}
    del bare["text"]
    whole = {**CHAIN, "missing": None, "blocks": 0}
    text = explain_text({"request_id": "", "chain": whole, "decision": None, "prompt": bare})
    check_shape(text)
    assert "9 tokens: 0 full blocks of 64, no salt" in text
    assert "no other recent prompt" in text
    for name in ("is_seen", "nearest_tokens", "has_nearest"):
        del bare[name]
    text = explain_text({"request_id": "", "chain": whole, "decision": None, "prompt": bare})
    check_shape(text)
    assert "unknown: only operators on the engine's node can see this" in text


def test_where_nothing_was_found_nothing_was_predicted() -> None:
    unknown = {"mean": None, "p95": None}
    plan = {
        **DECISION["plan"],
        "restore_s": unknown,
        "recompute_s": unknown,
        "first_token_s": None,
        "first_token_by_recompute_s": None,
    }
    decision = {**DECISION, "reason": "nothing", "plan": plan}
    text = explain_text({"request_id": "", "chain": None, "decision": decision})
    check_shape(text)
    assert "predicted" not in text


@pytest.mark.slow
def test_output_that_cannot_be_written_is_said_to_be() -> None:
    few = ("--sessions=1", "--prompt-tokens=99", "--jobs=1")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            kvtier_command("plan", "--model-layers=1", "--kv-heads=1", "--head-dim=8", *few),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "kvtier: cannot write to standard output: No space left on device\n"


def test_a_probe_is_a_table() -> None:
    rounds = [
        {"is_read": False, "block_bytes": 64 << 10, "num_blocks": 4, "depth": 1, "seconds": 0.004},
        {"is_read": True, "block_bytes": 64 << 10, "num_blocks": 1, "depth": 1, "seconds": 0.0001},
        {"is_read": True, "block_bytes": 64 << 10, "num_blocks": 1, "depth": 4, "seconds": 0.0002},
        {"is_read": False, "block_bytes": 8 << 20, "num_blocks": 1, "depth": 1, "seconds": 123.0},
        {"is_read": True, "block_bytes": 8 << 20, "num_blocks": 1, "depth": 1, "seconds": 1e-9},
    ]
    for place, each in enumerate(rounds):
        each["model_s"] = 0.00012 if place in {1, 4} else None
    tier = {"device": "/dev/nvme0n1 ext4 1", "measured_s": 1_700_000_000, "rounds": rounds}
    none = {"device": "", "measured_s": 0, "rounds": [], "reason": "it is not configured"}
    text = probe_text({"tiers": {"ssd": tier | {"reason": ""}, "remote": none}})
    print(text)
    check_shape(text)
    assert "0.12 ms" in text
    assert "not measured: it is not configured" in text
    kept = tier | {"reason": "it is full", "is_kept": True}
    assert "not measured again: it is full" in probe_text({"tiers": {"ssd": kept}})
    assert probe_text({"tiers": {}}) == "no tier below the CPU"


# With real processes.


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[tuple[RunningNode, str]]:
    with work_directory() as directory:
        node = RunningNode(directory, {"cost.restore": "auto"})
        with node.daemon() as daemon:
            engine, url = node.engine(tiny_folder)
            with engine:
                await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
                yield node, url
                assert engine.stop() == 0
            assert daemon.stop() == 0


@dataclass(frozen=True, slots=True)
class Told:
    returncode: int
    stdout: str
    stderr: str


def run(node: RunningNode, *arguments: str, given: str = "") -> Told:
    """Run a command in this process, as a script would in its own."""
    out, err = io.StringIO(), io.StringIO()
    words = [*arguments, "--socket", str(node.socket)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    return Told(code, out.getvalue(), err.getvalue())


def explained(node: RunningNode, url: str, *arguments: str, given: str = "") -> Any:
    told = run(node, "explain", "--engine", url, "--json", *arguments, given=given)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


LONG = [3 + (7 * place) % 200 for place in range(300)]


@pytest.mark.slow
def test_a_prompt_before_and_after_it_was_there(served: tuple[RunningNode, str]) -> None:
    node, url = served
    tokens = json.dumps(LONG)
    before = explained(node, url, "--tokens", "-", given=tokens)
    assert before["chain"]["blocks"] == 4
    assert before["chain"]["served"]["blocks"] == 0
    assert before["chain"]["missing"]["fate"] in {"never_stored", "not_offered"}
    answer = complete(url, LONG)
    await_true(
        lambda: (
            explained(node, url, "--tokens", "-", given=tokens)["chain"]["tiers"]["ssd"]["blocks"]
            == 4
        ),
        "it is stored",
        30,
    )
    after = explained(node, f"{url}/v1/", "--tokens", "-", given=tokens)
    assert after["chain"]["tiers"]["ssd"]["blocks"] == 4
    assert after["chain"]["missing"] is None
    assert after["prompt"]["is_seen"] is True
    other = " ".join(map(str, [*LONG[:200], *reversed(LONG[200:])]))
    told = run(node, "explain", "--engine", url, "--tokens", "-", given=other)
    assert told.returncode == 0, told.stderr
    check_shape(told.stdout.rstrip("\n"))
    assert "at token 200, in block 3" in told.stdout
    assert "there" not in told.stdout
    told = run(node, "explain", "--engine", url, "--tokens", "-", "--text", given=other)
    assert "│" in told.stdout
    assert "from block 3, token 192" in told.stdout
    told = run(node, "explain", "--request", answer["id"])
    assert told.returncode == 0, told.stderr
    assert "decision" in told.stdout
    check_shape(told.stdout.rstrip("\n"))
    assert json.loads(run(node, "explain", "--request", answer["id"], "--json").stdout)["decision"]


@pytest.mark.slow
def test_the_salt_is_why(served: tuple[RunningNode, str]) -> None:
    node, url = served
    prompt = [5 + place % 90 for place in range(200)]
    complete(url, prompt)
    await_true(
        lambda: (
            explained(node, url, "--tokens", "-", given=json.dumps(prompt))["chain"]["missing"]
            is None
        ),
        "it is stored",
        20,
    )
    told = explained(node, url, "--tokens", "-", "--salt", "mine", given=json.dumps(prompt))
    assert told["chain"]["missing"]["fate"] == "salt"
    assert told["prompt"]["nearest_tokens"] == 0, "tenants are not compared"


@pytest.mark.slow
def test_texts_messages_and_short_prompts(served: tuple[RunningNode, str], tmp_path: Path) -> None:
    node, url = served
    file = tmp_path / "prompt"
    file.write_text("hello " * 50)
    told = explained(node, url, "--prompt", f"@{file}")
    assert told["chain"]["blocks"] > 0
    assert explained(node, url, "--prompt", "@-", given="hello " * 50)["chain"] == told["chain"]
    told = explained(node, url, "--prompt", "hi")
    assert told["chain"]["blocks"] == 0
    assert told["chain"]["missing"]["fate"] == "too_short"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "pass --request"),
        (["--request", "nobody"], "no decision recorded for 'nobody'"),
        (["--request", ""], "is empty"),
        (["--prompt", ""], "is empty"),
        (["--prompt", "@/nowhere"], "no such file"),
        (["--tokens", "-"], "rejected"),
        (["--messages", "-"], "invalid JSON"),
        (["--prompt", "x", "--salt", ""], "--salt: is empty"),
        (["--prompt", "x", "--engine", "http://127.0.0.1:1"], "cannot reach an engine"),
        (["--prompt", "x", "--engine", "127.0.0.1:1"], "is not a valid URL"),
        (["--prompt", "x", "--engine", "ftp://127.0.0.1:1"], "is not a valid URL"),
        (["--prompt", "x", "--engine", "http://[::1"], "is not a valid URL"),
        (["--prompt", "x", "--engine", "http://127.0.0.1:99999"], "is not a valid URL"),
        (["--prompt", "x", "--engine", "http://key@127.0.0.1:1"], "is not a valid URL"),
        (["--request", "\udcff"], "--request: not valid UTF-8"),  # a byte that is no UTF-8
        (["--prompt", "\udcff"], "--prompt: not valid UTF-8"),
        (["--prompt", "x", "--salt", "\udcff"], "--salt: not valid UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(
    served: tuple[RunningNode, str], arguments: list[str], says: str
) -> None:
    node, url = served
    more = [] if "--engine" in arguments else ["--engine", url]
    told = run(node, "explain", *arguments, *more)
    assert told.returncode == 2, told.stdout
    assert says in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert "Traceback" not in told.stderr


@pytest.mark.slow
def test_a_stranger_is_not_taken_for_an_engine(served: tuple[RunningNode, str]) -> None:
    node, _ = served
    told = run(node, "explain", "--prompt", "x", "--engine", f"http://127.0.0.1:{node.http_port}")
    assert told.returncode == 2
    assert "is not a kvtier engine" in told.stderr


@pytest.mark.slow
def test_without_a_daemon(served: tuple[RunningNode, str], tmp_path: Path) -> None:
    _, url = served
    told = run(RunningNode(tmp_path), "explain", "--prompt", "x", "--engine", url)
    assert told.returncode == 2
    assert "kvtier serve" in told.stderr


@pytest.mark.slow
def test_a_probe_of_a_running_daemon(served: tuple[RunningNode, str]) -> None:
    node, _ = served
    before = node.stat()["tiers"]["ssd"]["blocks"]
    told = run(node, "probe")
    assert told.returncode == 0, told.stderr
    print(told.stdout)
    check_shape(told.stdout.rstrip("\n"))
    document = json.loads(run(node, "probe", "--tier", "ssd", "--json").stdout)
    rounds = document["tiers"]["ssd"]["rounds"]
    assert {each["block_bytes"] for each in rounds} >= {64 << 10, 1 << 20}
    assert node.stat()["tiers"]["ssd"]["blocks"] == before
    told = run(node, "probe", "--tier", "cpu")
    assert told.returncode == 1
    assert "measured by the engines' own loads" in " ".join(told.stdout.split())


@pytest.mark.slow
def test_tiers_are_measured_at_the_first_start_and_not_at_the_next(tmp_path: Path) -> None:
    node = RunningNode(tmp_path, {"cost.probe": "start", "ssd.scrub_rate": "0B"})
    with node.daemon() as daemon:
        daemon.await_log('event="tier measured" tier=ssd')
        assert node.stat()["tiers"]["ssd"]["blocks"] == 0
        assert node.stat()["background_faults"].get("probe", 0) == 0
        assert daemon.stop() == 0
    kept = json.loads((tmp_path / "ssd" / "learned.json").read_text())
    assert kept["learned"]["probe"]["tiers"]["ssd"]["rounds"]
    with node.daemon() as daemon:
        told = json.loads(run(node, "probe", "--tier", "remote", "--json").stdout)
        assert told["tiers"]["remote"]["reason"] == "it is not configured"
        assert daemon.stop() == 0
        assert "tier measured" not in daemon.log
