"""The demo as a user runs it, with a tiny model; and the real one, where it takes minutes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

import kvtier
from kvtier.cli.demo.deployment import DemoDeployment
from kvtier.cli.demo.passes import QUESTIONS, DemoProgress, DemoRun
from kvtier.core.residency import TierName
from kvtier.testing.child import Child, await_true, kvtier_command, work_directory
from tests.engine.models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXT = "A block is kept where it is cheap, and comes back when that is faster. " * 20


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def work() -> Iterator[Path]:
    """Where the demo makes its temporary directory; empty again when it has ended."""
    with work_directory() as path:  # short enough for the socket in it
        yield path


def demo(work: Path, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        kvtier_command("demo", *map(str, arguments)),
        env=os.environ | {"TMPDIR": str(work)},
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )


def left_running(work: Path, option: str = "") -> list[int]:
    """Processes that were started with something in ``work``, and with an option."""
    return [
        running.pid
        for running in psutil.process_iter(["cmdline"])
        if any(str(work) in word for word in running.info["cmdline"] or [])
        and (not option or option in running.info["cmdline"])
    ]


def check_passes(output: str, names: list[str]) -> None:
    document = json.loads(output)
    assert list(document) == ["passes"]
    assert [row["name"] for row in document["passes"]] == names
    for row in document["passes"]:
        assert set(row) == {
            "name",
            "ttft_s",
            "prompt_tokens",
            "tier_tokens",
            "computed_tokens",
            "same_as_cold",
        }
        assert row["same_as_cold"] is True
        assert row["ttft_s"] > 0
        served = row["tier_tokens"]
        assert list(served) == ["gpu", "cpu", "ssd", "remote"]
        assert sum(served.values()) + row["computed_tokens"] == row["prompt_tokens"]
        for tier, num_tokens in served.items():
            assert (num_tokens > 0) == (tier == row["name"])


@pytest.mark.redis
def test_every_tier_serves_and_nothing_is_left(tiny_model, document, work, redis_server):
    arguments = ("--model", tiny_model, "--document", document, "--redis", redis_server)
    done = demo(work, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    check_passes(done.stdout, ["cold", "gpu", "cpu", "ssd", "remote"])
    assert f"the document has {len(TEXT)} characters" in done.stderr, "it was cut, and said so"
    assert not list(work.iterdir())
    assert not left_running(work)
    with redis.Redis.from_url(redis_server, socket_timeout=60) as server:
        assert not server.keys("kvtier-demo-*")


def test_an_interrupt_leaves_nothing(tiny_model, document, work, tmp_path):
    command = kvtier_command("demo", "--model", str(tiny_model), "--document", str(document))
    with Child(command, tmp_path / "log", {"TMPDIR": str(work)}) as child:
        await_true(lambda: list(work.glob("*/k.sock")), "the daemon is there", 60)
        child.send(signal.SIGINT)
        assert child.wait(60) == 130
    assert not list(work.iterdir())
    assert not left_running(work)


def test_what_it_started_ends_with_a_demo_that_is_killed(tiny_model, document, work, tmp_path):
    command = kvtier_command("demo", "--model", str(tiny_model), "--document", str(document))
    with Child(command, tmp_path / "log", {"TMPDIR": str(work)}) as child:
        await_true(lambda: left_running(work, "--supervised"), "both were started", 60)
        child.kill()
    await_true(lambda: not left_running(work), "both have ended", 30)


class Forgetful(DemoDeployment):
    """A product whose SSD tier loses all whenever another tier is emptied."""

    def drop(self, *tiers: TierName) -> None:
        super().drop(*dict.fromkeys((*tiers, TierName.SSD)))


def test_a_tier_that_does_not_serve_is_a_problem(tiny_model, tmp_path):
    with DemoProgress() as progress, Forgetful(tmp_path, tiny_model, "") as product:
        passes = DemoRun(product, TEXT, progress).passes()
    problems = {done.name: done.problems for done in passes if done.problems}
    assert list(problems) == ["ssd"]
    assert len(problems["ssd"]) == len(QUESTIONS)
    assert all("served 0 tokens" in problem for problem in problems["ssd"])
    assert all(done.is_same_as_cold for done in passes), "a miss is slower and never wrong"


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (["--model", "nowhere.gguf"], "--model", "make setup"),
        (["--document", "nowhere.txt"], "--document", "no such file"),
        (["--document", "{picture}"], "--document", "not UTF-8"),
        (["--redis", "redis://127.0.0.1:1/0"], "--redis", "does not answer"),
        (["--redis", "not a url"], "--redis", "not a valid URL"),
        (["--model", "{picture}"], "engine.model", "not a GGUF file"),
        (["--document", "{short}"], "--document", "too few"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_gets_one_line(arguments, field, words, tiny_model, document, work, tmp_path):
    picture, short = tmp_path / "picture", tmp_path / "short"
    picture.write_bytes(b"\x89PNG\xff\xfe")
    short.write_text("Hello.")
    given = [word.format(picture=picture, short=short) for word in arguments]
    good = ["--model", str(tiny_model), "--document", str(document)]
    done = demo(work, *good, *given)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvtier: ")]
    assert line.startswith(f"kvtier: {field}: ")
    assert words in line
    assert not list(work.iterdir())


@pytest.mark.long
@pytest.mark.model
def test_the_real_model_and_document(work, document, demo_model):
    """The beginning of its document: all of it takes a core ten minutes beside other tests."""
    whole = (Path(kvtier.__file__).parents[1] / "docs" / "architecture.md").read_text()
    document.write_text(whole[:4_000])
    done = demo(work, "--model", demo_model, "--document", document, "--json")
    print(done.stderr, done.stdout, file=sys.stderr)
    assert done.returncode == 0
    check_passes(done.stdout, ["cold", "gpu", "cpu", "ssd"])
