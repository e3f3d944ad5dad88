"""``kvtier top`` in a real terminal, and ``kvtier stat``, of a daemon under load."""

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import main
from kvtier.testing.child import await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.asking import Users
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.slow

AT_ONCE_S = 30.0
"""What is answered without the daemon, on a machine that other tests keep busy."""

_COLOR = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9\d|10[0-7])[;m]")


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    settings = {"cpu.capacity": "2MiB", "cost.restore": "auto", "ssd.write_budget": "1GiB"}
    with work_directory() as directory:
        node = RunningNode(directory, settings)
        with node.daemon(), Users(node.socket):
            yield node


def top(node: RunningNode, *more: str) -> list[str]:
    return kvtier_command("top", "--connect", str(node.socket), "--interval", "250ms", *more)


def test_everything_is_seen_in_a_small_window_and_more_in_a_large_one(node: RunningNode) -> None:
    with Terminal(top(node), environment={"COLUMNS": "70", "LINES": "20"}) as terminal:
        terminal.await_shown(r"^saved \d.* time to first token in the last ")
        for part in (
            r"^kvtier \d+\.\d+.*pid \d+.*q quits$",
            r"^cpu +up +[█░]+ +\d+% +\S+ [KM]iB +2 MiB +\d+ +[\d.]+ tok/s$",
            r"^remote +off ",
            r"^cpu → gpu +[\d.]+ \w+/s  cpu → ssd +[\d.]+ \w+/s  cpu → remote +0 B/s$",
            r"^decisions +all [\d.]+/s",
            r"^busy-engine +[\d.]+/s +[\d.]+k?/s +\d+ % +20 ms +3 +-$",
            r"^cmpl-[0-9a-f]{8}-0 +\d+ s +\d+ +\d+ +(cpu|ssd) +all +20 ms +~?\d+ ms$",
        ):
            terminal.await_shown(part)
        few = terminal.shown.count("cmpl-")
        terminal.resize(120, 40)
        terminal.await_true(lambda: terminal.shown.count("cmpl-") > few + 8, "more", AT_ONCE_S)
        terminal.resize(50, 10)
        terminal.await_true(lambda: "cmpl-" not in terminal.shown, "less", AT_ONCE_S)
        assert "saved" in terminal.shown
        terminal.press("x\x1b[A")  # which mean nothing
        terminal.press("q")
        assert terminal.wait() == 0
        assert terminal.is_given_back
        assert _COLOR.search(terminal.written), "there is colour where nobody minds"


def test_a_daemon_that_is_slow_away_and_back(node: RunningNode) -> None:
    with work_directory() as directory:
        other = RunningNode(directory)
        with Terminal(top(other), environment={"NO_COLOR": "1"}) as terminal:
            terminal.await_shown("cannot reach the daemon at")
            with other.daemon() as daemon:
                terminal.await_shown(rf"pid {daemon.pid} .*q quits")
                with daemon.stopped():
                    assert "did not answer" in terminal.await_shown(
                        r"\d s old$(?s:.*)did not answer"
                    )
                terminal.await_shown("q quits")
                daemon.kill()
            assert f"pid {daemon.pid}" in terminal.await_shown("old(?s:.*)cannot reach the daemon")
            with other.daemon() as daemon:
                assert "answer" not in terminal.await_shown(rf"pid {daemon.pid} .*q quits")
                with daemon.stopped():
                    terminal.send(signal.SIGTERM)
                    assert terminal.wait() == 128 + signal.SIGTERM
            assert terminal.is_given_back
            assert not _COLOR.search(terminal.written)
            assert b"Traceback" not in terminal.written


def test_it_can_be_stopped_and_taken_up_again_like_any_program(node: RunningNode) -> None:
    with Terminal(["bash", "--norc", "-i"], environment={"PS1": "$ "}) as terminal:
        terminal.await_shown(r"^\$")
        terminal.press(" ".join(top(node, "--no-color")) + "\n")
        terminal.await_shown("q quits")
        terminal.press("\x1a")
        terminal.await_shown("Stopped")
        assert "q quits" not in terminal.shown
        terminal.press("fg\n")
        terminal.await_shown("q quits")
        terminal.press("\x03")
        terminal.await_true(lambda: "q quits" not in terminal.shown, "it ends", AT_ONCE_S)
        terminal.press("echo code $?\nexit\n")
        terminal.await_shown(r"^code 130$")
        assert terminal.wait() == 0
        assert not _COLOR.search(terminal.written)


def test_where_nothing_can_be_drawn_frames_are_printed(node: RunningNode) -> None:
    with Terminal(top(node), environment={"TERM": "dumb"}) as terminal:
        terminal.await_true(lambda: terminal.written.count(b"served") > 1, "two frames", 60)
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert b"\x1b" not in terminal.written


def test_one_frame_for_a_file(node: RunningNode, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["top", "--once", "--interval", "200ms", "--connect", str(node.socket)]
    await_true(lambda: main(words) == 0, "it answers within a second, when others let it")
    told = capsys.readouterr()
    assert not told.err
    assert "\x1b" not in told.out
    assert max(map(len, told.out.splitlines())) <= 80
    assert "busy-engine" in told.out
    with work_directory() as directory:
        command = ["top", "--once", "--interval", "200ms", "--connect", str(directory / "none")]
        assert main(command) == 2
    assert "cannot reach the daemon" in capsys.readouterr().out


@pytest.mark.parametrize("interval", ["0", "0.1", "100ms", "2h", "soon", "-1s", "1 fortnight"])
def test_an_interval_that_is_none(interval: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["top", f"--interval={interval}"])
    assert caught.value.code == 2
    assert "argument --interval: " in capsys.readouterr().err


# kvtier stat

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "watching.md"

PLACES: Mapping[str, str] = {
    "tiers": "<tier>",
    "worth.tiers": "<tier>",
    "worth.regret_by_road_s": "<road>",
    "grown": "<window>",
    "grown.<window>.served_tokens": "<tier>",
    "grown.<window>.moved_bytes": "<route>",
    "grown.<window>.decisions": "<reason>",
    "grown.<window>.missed_blocks": "<fate>",
    "engines[].lately": "<counter>",
    "worth.decisions": "<reason>",
    "worth.predicted_s": "<of>",
    "worth.actual_s": "<of>",
    "worth.missed_blocks": "<fate>",
    "worth.refused_blocks": "<tier>",
    "worth.refused_blocks.<tier>": "<rule>",
    "key_spaces[].tiers": "<tier>",
    "tokens.found": "<tier>",
    "tokens.loaded": "<tier>",
    "tokens.left": "<reason>",
    "tokens.unloaded": "<reason>",
    "lookup_blocks.hit": "<tier>",
    "lookup_blocks.pending": "<tier>",
    "miss_reasons": "<tier>",
    "miss_reasons.<tier>": "<reason>",
    "probed_lookups": "<outcome>",
    "transfers": "<route>",
    "config.secrets": "<secret>",
    "background_faults": "<task>",
    "policy.gates": "<tier>",
    "cost.routes": "<route>",
    "cost.engines": "<key_space>",
    "requests[].found_tokens": "<tier>",
    "requests[].restored_tokens": "<tier>",
}
"""What goes by names from a closed set, or from clients."""


QUIET = (
    *("policy.gates", "policy.classes[].depths", "config.last_reload.", "config.secrets."),
    "cost.unmeasured.",
)
"""What this daemon has no occasion to tell."""


def keys_of(part: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value, with closed sets by their name."""
    if path == "tiers.<tier>.detail":
        yield path
    elif path in PLACES and not part:
        yield f"{path}.{PLACES[path]}"
    elif isinstance(part, dict):
        for key, value in part.items():
            place = PLACES.get(path, key)
            yield from keys_of(value, f"{path}.{place}" if path else place)
    elif isinstance(part, list) and part:
        for value in part:
            yield from keys_of(value, f"{path}[]")
    else:
        yield f"{path}[]" if isinstance(part, list) else path


def test_every_key_of_the_document_is_documented(node: RunningNode) -> None:
    document = await_true(
        lambda: (told := node.stat())["worth"]["saved_s"] and told, "something was restored"
    )
    _, _, tables = PAGE.read_text().partition("## The document")
    rows = re.findall(r"^\| (`[^|]*) \|", tables, re.MULTILINE)
    documented = {name for row in rows for name in re.findall("`(.*?)`", row)}
    names = {re.sub(r"^tiers\.(gpu|cpu)\.", "tiers.<tier>.", name) for name in documented}
    # A group without a member stands for what is documented of its members.
    groups = {name.rpartition(".")[0] for name in names}
    found = set(keys_of(document))
    unknown = sorted(found - names - groups)
    assert not unknown, f"docs/operations/watching.md does not explain {unknown}"
    gone = sorted(name for name in names - found if not name.startswith(QUIET))
    assert not gone, f"docs/operations/watching.md explains what is not there: {gone}"


def test_what_engines_and_requests_did_adds_up_to_what_the_daemon_tells(node: RunningNode) -> None:
    document = node.stat()
    (engine,) = document["engines"]
    assert engine["found_tokens"] == sum(document["tokens"]["found"].values())
    assert engine["saved_s"] == pytest.approx(document["worth"]["saved_s"], abs=0.001)
    stored_bytes = engine["stored_tokens"] // engine["block_tokens"] * engine["block_bytes"]
    assert stored_bytes == document["transfers"]["gpu_to_cpu"]["bytes"]
    (space,) = document["key_spaces"]
    for tier in ("cpu", "ssd"):
        blocks = space["tiers"][tier]["blocks"]
        assert blocks == document["tiers"][tier]["blocks"]
        assert space["tiers"][tier]["bytes"] == blocks * engine["block_bytes"]
    for request in document["requests"]:
        assert request["request_id"].startswith("cmpl-")
        restored = sum((request["restored_tokens"] or {}).values())
        assert restored <= request["planned_tokens"] <= sum(request["found_tokens"].values())


def test_the_script_is_told_what_is_wrong_by_the_exit_code(
    node: RunningNode, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(of: RunningNode) -> tuple[int, str]:
        code = main(["stat", "--check", "--connect", str(of.socket)])
        return code, capsys.readouterr().out

    await_true(lambda: check(node) == (0, ""), "it answers within a second, when others let it")
    with work_directory() as directory:
        broken = RunningNode(directory, {"remote.url": "redis://127.0.0.1:1/0"})
        assert check(broken) == (2, "")
        with broken.daemon():
            broken.await_state("remote", "out")
            told = await_true(
                lambda: (found := check(broken))[0] == 1 and found[1], "it answers within a second"
            )
    assert re.fullmatch(r"remote is out: \S.*\n", told), told
