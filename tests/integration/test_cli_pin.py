"""``kvtier pin`` and ``kvtier warm`` on a prompt, as an operator gives them."""

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, complete

pytestmark = pytest.mark.slow

PROMPT = [3 + (7 * place) % 200 for place in range(300)]


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[tuple[RunningNode, str]]:
    with work_directory() as directory:
        node = RunningNode(directory, {"policy.eviction": "rd-sec"})
        with node.daemon() as daemon:
            engine, url = node.engine(tiny_folder)
            with engine:
                await_true(lambda: node.stat()["engines"], "the engine is attached", 30)
                complete(url, PROMPT)
                node.await_blocks("ssd", 4)
                yield node, url
                assert engine.stop() == 0
            assert daemon.stop() == 0


@dataclass(frozen=True, slots=True)
class Told:
    returncode: int
    stdout: str
    stderr: str


def run(
    served: tuple[RunningNode, str], command: str, *arguments: str, prompt: list[int] = PROMPT
) -> Told:
    """Run a command in this process, as a script would in its own."""
    node, url = served
    out, err = io.StringIO(), io.StringIO()
    words = [command, "--socket", str(node.socket), "--engine", url, *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(prompt).encode())))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as wrong:  # as argparse says it
                code = int(str(wrong.code))
    return Told(code, out.getvalue(), err.getvalue())


def test_a_prompt_is_pinned_and_let_go(served: tuple[RunningNode, str]) -> None:
    told = run(served, "pin", "--tokens", "-", "--ttl", "60")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "pinned 4 of 4 blocks for 60 s\n"
    told = run(served, "pin", "--tokens", "-", "--ttl", "60", "--json")
    assert json.loads(told.stdout) == {"blocks": 4, "of_blocks": 4, "reason": "", "ttl_s": 60}
    told = run(served, "pin", "--tokens", "-", "--ttl", "0")
    assert told.returncode == 0
    assert told.stdout == "unpinned 4 blocks\n"


def test_a_prompt_is_warmed(served: tuple[RunningNode, str]) -> None:
    node, _ = served
    node.await_idle()
    node.drop("cpu")
    told = run(served, "warm", "--tokens", "-", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    document = json.loads(told.stdout)
    assert document["ready_blocks"] + document["coming_blocks"] == document["of_blocks"] == 4
    await_true(lambda: node.stat()["tiers"]["cpu"]["blocks"] == 4, "they are there", 20)
    told = run(served, "warm", "--tokens", "-")
    assert told.stdout == "4 of 4 blocks are in the CPU tier, 0 in flight\n"


def test_what_no_tier_has_cannot_be_warmed(served: tuple[RunningNode, str]) -> None:
    told = run(served, "warm", "--tokens", "-", prompt=PROMPT[::-1])
    assert told.returncode == 1
    assert told.stdout == (
        "0 of 4 blocks are in the CPU tier, 0 in flight; the next block is in no tier\n"
    )


@pytest.mark.parametrize("command", ["pin", "warm"])
def test_a_prompt_that_fills_no_block_is_not_said_to_be_kept(
    served: tuple[RunningNode, str], command: str
) -> None:
    told = run(served, command, "--tokens", "-", prompt=PROMPT[:10])
    assert told.returncode == 1
    assert told.stdout == "the prompt is shorter than one block, and only full blocks are cached\n"


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("pin", ["--ttl", "60"], "pass one of --prompt"),
        ("pin", ["--tokens", "-", "--ttl", "-1"], "expected seconds or a duration such as 5min"),
        ("pin", ["--tokens", "-", "--ttl", "1e3"], "expected a duration in whole seconds"),
        ("pin", ["--tokens", "-", "--ttl", "99999999999"], "at most 30 days"),
        ("warm", [], "pass one of --prompt"),
        ("warm", ["--tokens", "-", "--timeout", "0"], "expected seconds or a duration"),
        ("warm", ["--tokens", "-", "--engine", "http://127.0.0.1:1"], "cannot reach an engine"),
    ],
)
def test_what_is_wrong_is_said(
    served: tuple[RunningNode, str], command: str, arguments: list[str], says: str
) -> None:
    told = run(served, command, *arguments)
    assert told.returncode == 2
    assert says in told.stderr
    assert "Traceback" not in told.stderr
