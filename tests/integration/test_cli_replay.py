"""``kvtier replay`` and ``kvtier plan`` as a user runs them."""

import json
import lzma
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvtier.cli.main import main
from kvtier.config import load_config
from kvtier.sim.replay.traffic import Traffic
from kvtier.testing.child import Child, await_true, kvtier_command, work_directory

pytestmark = pytest.mark.slow

TINY = ("--model-layers", "1", "--kv-heads", "1", "--head-dim", "1")
FEW = ("--sessions", "1", "--prompt-tokens", "99")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace as Mooncake writes them, compressed."""
    described = Traffic(5, prompt_tokens=1000, turn_tokens=300, gap_s=40.0, hours=0.1, seed=1)
    rows = [
        {
            "timestamp": request.at_ns // 10**6,
            "input_length": request.num_tokens,
            "output_length": 1,
            "hash_ids": [*request.blocks.tolist(), -1],
        }
        for request in described.trace().requests
    ]
    path = tmp_path_factory.mktemp("trace") / "small_trace.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    return path


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as ended:  # as argparse ends a program
            code = int(str(ended.code))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


def test_replay_prints_tables_json_and_a_page(run: Run, trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    sizes = ("--cpu-blocks", "60", "--cpu-blocks", "200", "--ssd-blocks", "100")
    how = ("--hash-tokens", "64", "--report", str(page), "--jobs", "1")
    shown = run("replay", str(trace), *how, *sizes)
    assert shown.returncode == 0, shown.stderr
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for word in ("rd-sec", "lru", "best", "second half", "no cache", "per read"):
        assert word in shown.stdout
    assert page.read_text().startswith("<!doctype html>")
    printed = run("replay", str(trace), "--hash-tokens", "64", *sizes, "--json", "--jobs", "1")
    document = json.loads(printed.stdout)
    assert document["version"] == 1
    assert [bound["blocks"] for bound in document["bounds"]] == [160, 300]
    assert [(r["policy"], r["cpu_blocks"]) for r in document["runs"]] == [
        ("rd-sec", 60),
        ("rd-sec", 200),
        ("lru", 60),
        ("lru", 200),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cpu-blocks", "0"), "expected a positive integer"),
        (("--cpu-blocks", "many"), "expected a positive integer"),
        (("--policy", "magic"), "invalid choice"),
        (("--hints", "2"), "expected a number from 0 to 1"),
        (("--set", "ssd.gate"), "use --set"),
        (("--set", "ssd.gate=5"), "ssd.gate"),
        (("--block-tokens", "100"), "--block-tokens"),
        (("--machine", "/absent.toml"), "cannot be read"),
        (("--prefill-profile", "/absent.csv"), "cannot be read"),
        (("--config", "/absent.toml"), "absent.toml"),
        (("--report", "/absent/page.html"), "is not a directory"),
        (("--report", "/"), "is a directory"),
        (("--report", "/dev/full", "--cpu-blocks", "9", "--policy", "lru"), "no space left"),
        (("--cpu-blocks", "3"), "use 4 to"),
        (("--cpu-blocks", "9" * 5000), "expected a positive integer"),
        (("--cpu-blocks", str(2**30)), "use 4 to"),
        (("--hash-tokens", "1000000"), "--block-tokens"),
    ],
)
def test_replay_says_what_is_wrong_on_one_line(
    run: Run, trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run("replay", str(trace), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_is_a_configuration_that_serves(run: Run, tmp_path: Path) -> None:
    written = tmp_path / "kvtier.toml"
    model = ("--model-layers", "4", "--kv-heads", "2", "--head-dim", "64")
    traffic = ("--sessions", "2", "--prompt-tokens", "500", "--gap", "90", "--jobs", "1")
    done = run("plan", *model, *traffic, "--target", "memory=64MiB", "--write", str(written))
    assert done.returncode == 0, done.stderr
    lines = [
        line for line in done.stdout.splitlines() if not line.startswith("configuration written to")
    ]
    assert max(map(len, lines)) <= 80
    for word in ("break-even", "knee", "sessions", "expected"):
        assert word in done.stdout
    config = load_config(written, {}, {})
    assert config.policy.eviction == "rd-sec"
    assert config.cpu.capacity_bytes >= 64 << 20
    with work_directory() as directory:
        serve = kvtier_command("serve", "--config", str(written), "--set", "http.listen=")
        serve += ["--set", f"ssd.directory={directory / 'ssd'}"]
        serve += ["--set", f"daemon.socket={directory / 's'}"]
        with Child(serve, directory / "log", dict(os.environ)) as daemon:
            daemon.await_log("event=ready", 30)
            assert daemon.stop() == 0


def test_a_plan_as_json_from_a_trace_and_a_model_folder(
    run: Run, trace: Path, tmp_path: Path
) -> None:
    fields = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    fields |= {"num_hidden_layers": 4, "intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    read = ("--trace", str(trace), "--hash-tokens", "64", "--json", "--jobs", "1")
    done = run("plan", str(tmp_path), *read, "--target", "hits=0.2")
    document = json.loads(done.stdout)
    assert document["model"]["token_bytes"] == 4 * 2 * 2 * 64 * 2
    assert document["reached"]
    sizes = [point["blocks"] for point in document["curve"]]
    assert sizes == sorted(sizes)
    assert document["bend_blocks"] in sizes
    out_of_reach = run("plan", str(tmp_path), *read, "--target", "hits=0.999")
    assert out_of_reach.returncode == 1
    assert not json.loads(out_of_reach.stdout)["reached"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "model: not given"),
        (("--model-layers", "1", "--kv-heads", "1", "--head-dim", "1"), "traffic: not given"),
        (("/absent", "--sessions", "1", "--prompt-tokens", "9"), "does not exist"),
        (("--target", "luck=1"), "expected hits="),
        (("--target", "memory=lots"), "lots"),
        ((*TINY, "--sessions", "0", "--prompt-tokens", "9"), "--sessions: 0 is out of range"),
        ((*TINY, "--sessions", "1000000000", "--prompt-tokens", "9"), "--sessions"),
        ((*TINY, "--sessions", "1", "--prompt-tokens", "1000000000"), "--prompt-tokens"),
        ((*TINY, *FEW, "--turn-tokens", "-5"), "--turn-tokens"),
        ((*TINY, *FEW, "--turns", "1000000000"), "--turns"),
        ((*TINY, *FEW, "--shared-tokens", "1000000000"), "--shared-tokens"),
        ((*TINY, *FEW, "--gap", "nan"), "--gap"),
        ((*TINY, *FEW, "--gap", "inf"), "--gap"),
        ((*TINY, *FEW, "--jobs", "-1"), "--jobs"),
        ((*TINY, *FEW, "--set", "policy"), "has no '='"),
        ((*TINY, *FEW, "--trace", "any.jsonl"), "traffic: given twice"),
        ((".", *TINY, *FEW), "model: given twice"),
        (("--model-layers", "65536", "--kv-heads", "65536", "--head-dim", "65536", *FEW), "of KV"),
    ],
)
def test_plan_says_what_is_wrong_on_one_line(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    """No number, however absurd, is worked at for long, or ends in anything but a sentence."""
    done = run("plan", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_of_next_to_nothing_is_replayed(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp_s": 0, "hash_ids": [], "input_length": 0}\n')
    done = run("replay", str(trace), "--jobs", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [each["cpu_blocks"] for each in json.loads(done.stdout)["runs"]] == [4, 4]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_replay_that_is_ended_leaves_no_process_and_no_half_page(
    tmp_path: Path, number: signal.Signals
) -> None:
    described = Traffic(50, prompt_tokens=4000, turn_tokens=500, gap_s=40.0, hours=1.0, seed=1)
    rows = [
        {
            "timestamp_s": request.at_ns / 1e9,
            "input_length": request.num_tokens,
            "hash_ids": [*request.blocks.tolist(), -1],
        }
        for request in described.trace().requests
    ]
    trace, page = tmp_path / "t.jsonl", tmp_path / "page.html"
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ("--cpu-blocks", "500", "--jobs", "2", "--report", str(page))
    with Child(kvtier_command("replay", str(trace), *words), tmp_path / "log") as child:

        def workers() -> list[psutil.Process]:
            begun = psutil.Process(child.pid).children()
            return begun if sum(each.cpu_times().user > 1 for each in begun) >= 2 else []

        begun = await_true(workers, "both runs are under way", 60)
        child.send(number)
        assert child.wait() in {130, -number}
        _, alive = psutil.wait_procs(begun, timeout=20)
    assert not alive
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == []
