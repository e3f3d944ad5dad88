"""``kvtier stat`` and ``kvtier drop`` as an operator runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.main import main
from kvtier.client import ClientDeadlines
from kvtier.testing.child import Child, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon() as daemon:
            yield node
            assert daemon.stop() == 0


def run(node: RunningNode, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = kvtier_command(*arguments, "--socket", str(node.socket))
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_stat_shows_every_tier_in_eighty_columns(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(1, 6)
        node.await_idle()
        engine.load(1, 6)
        shown = run(node, "stat")
    assert shown.returncode == 0
    assert not shown.stderr
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for tier in ("gpu", "cpu", "ssd", "remote"):
        assert any(line.startswith(f"{tier} ") for line in lines), tier
    assert "pattern" in shown.stdout
    assert "shm" in shown.stdout
    assert "leases 0, pins 0" in shown.stdout


def test_a_name_that_a_client_gave_itself_steers_no_terminal(node: RunningNode) -> None:
    with PatternEngine(node.socket, name="a\x1b[31mb\nc") as engine:
        engine.store(9, 1)
        shown = run(node, "stat").stdout
    assert "a?[31mb?c" in shown
    assert shown.replace("\n", "").isprintable()


def test_counts_are_whole_numbers(node: RunningNode) -> None:
    document = json.loads(run(node, "stat", "--json").stdout)

    def check(value: object, path: str) -> None:
        if path in {".cost", ".policy", ".worth"}:
            return  # mostly measured; the counts in them are tested where they are made
        if isinstance(value, dict):
            for key, each in value.items():
                check(each, f"{path}.{key}")
        else:
            is_time = path.endswith(("seconds", "_s"))
            assert is_time or not isinstance(value, float), f"{path} is {value!r}"

    check(document, "")


def test_stat_watches_until_it_is_interrupted(node: RunningNode) -> None:
    command = kvtier_command("stat", "--socket", str(node.socket), "--watch", "0.1")
    with Child(command, node.directory / "watch.log") as child:
        child.await_log(r"(?s)leases.*leases")
        child.send(signal.SIGINT)
        assert child.wait() == 130
        assert "Traceback" not in child.log


@pytest.mark.parametrize("command", [["stat"], ["stat", "--json"], ["drop", "--tier", "cpu"]])
def test_without_a_daemon(command: list[str]) -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        start_s = time.monotonic()
        told = run(node, *command)
        print(f"{time.monotonic() - start_s:.2f} s")
        assert told.returncode == 2
        assert not told.stdout
        assert told.stderr.count("\n") == 1
        assert str(node.socket) in told.stderr
        assert "kvtier serve" in told.stderr


def test_a_file_without_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 16)
    token.chmod(0o600)
    words = ["stat", "--connect", "h:1", "--token-file", str(token), "--ca", str(token)]
    assert main(words) == 2
    assert f"--ca: {token} has no certificate; name" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e30", "soon"])
@pytest.mark.parametrize("command", [("stat", "--watch"), ("drop", "--tier", "cpu", "--timeout")])
def test_a_time_that_is_none(
    command: tuple[str, ...], value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *words, option = command
    with pytest.raises(SystemExit) as caught:
        main([*words, f"{option}={value}"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {option}: expected seconds or a duration such as 5min" in said
    assert f"got '{value}'" in said


def test_with_a_crashed_daemons_socket() -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon() as daemon:
            daemon.kill()
        told = run(node, "stat")
        assert told.returncode == 2
        assert "cannot reach the daemon" in told.stderr
        assert told.stderr.count("\n") == 1


def test_with_a_daemon_that_stands_still() -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon() as daemon, daemon.stopped():
            start_s = time.monotonic()
            told = run(node, "stat")
            took_s = time.monotonic() - start_s
        print(f"{took_s:.2f} s")
        assert told.returncode == 2
        assert "did not answer in time" in told.stderr
        assert took_s < 20, "two seconds, and those of a busy machine"


def test_drop_says_what_went(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(2, 6)
        node.await_idle()
        node.drop("cpu", "ssd")
        engine.store(2, 6)
        node.await_idle()
        told = run(node, "drop", "--tier", "cpu")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout == "cpu     removed 6 blocks, 48 KiB\n"
        told = run(node, "drop", "--tier", "ssd", "--tier", "gpu", "--json")
        assert told.returncode == 0
        removed = {each["tier"]: each for each in json.loads(told.stdout)["removed"]}
        assert removed["ssd"]["blocks"] == 6
        assert removed["gpu"]["blocks"] == 0
        assert engine.lookup(2, 6) == ([], "absent")


def test_drop_all_means_all_there_are(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(3, 6)
        node.await_idle()
        told = run(node, "drop", "--tier", "all")
        assert told.returncode == 0, told.stdout + told.stderr
        assert engine.lookup(3, 6) == ([], "absent")
    told = run(node, "drop", "--tier", "remote")
    assert told.returncode == 1
    assert "no such tier" in told.stdout


def test_drop_keeps_what_is_in_use_and_says_so(node: RunningNode) -> None:
    patient = ClientDeadlines(5, 60, 10, 0.1)
    with PatternEngine(node.socket, deadlines=patient) as engine:
        engine.store(4, 6)
        node.await_idle()
        blocks = engine.client.load(engine.tenant, engine.chain(4, 6), 0)
        next(blocks)
        told = run(node, "drop", "--tier", "cpu", "--timeout", "0.5")
        assert told.returncode == 1
        assert "kept 6 in use" in told.stdout
        assert list(blocks)[-1] == "complete", "the load was not disturbed"
        node.await_idle()
        assert engine.lookup(4, 6) == (["ssd"] * 6, "complete"), "they went when they were free"
        told = run(node, "drop", "--tier", "cpu")
        assert told.returncode == 0
        assert "removed 0 blocks" in told.stdout


def test_drop_names_an_engine_that_does_not_answer(node: RunningNode) -> None:
    source = (
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.integration.pattern import PatternEngine\n"
        f"with PatternEngine(Path({str(node.socket)!r})):\n"
        "    print('attached', flush=True)\n"
        "    import signal; signal.pause()\n"
    )
    command = [sys.executable, "-c", source]
    with Child(command, node.directory / "engine.log") as child:
        child.await_log("attached")
        assert run(node, "drop", "--tier", "gpu").returncode == 0
        with child.stopped():
            told = run(node, "drop", "--tier", "gpu", "--timeout", "0.5")
        assert told.returncode == 1
        assert "1 engine(s) did not empty their GPU tier" in told.stdout
        assert f"pattern (pid {child.pid}): no answer" in told.stdout


def test_drop_names_an_engine_that_cannot_empty_its_own_cache(node: RunningNode) -> None:
    one = PatternEngine(node.socket, name="one", drop=lambda: "ask\x1b me")
    with one, PatternEngine(node.socket):
        told = run(node, "drop", "--tier", "all")
        assert told.returncode == 1
        assert "1 engine(s) did not empty their GPU tier\n" in told.stdout
        assert f"        one (pid {os.getpid()}): ask? me\n" in told.stdout
        stat = run(node, "stat").stdout
        assert re.search(r"^gpu +unknown +- +- +- +- +-$", stat, re.MULTILINE), stat
        removed = json.loads(run(node, "drop", "--tier", "gpu", "--json").stdout)["removed"]
        assert removed[0]["keeping"] == [{"engine": "one", "pid": os.getpid(), "why": "ask\x1b me"}]
        assert run(node, "drop", "--tier", "cpu", "--tier", "ssd").returncode == 0


def test_output_may_be_cut_off(node: RunningNode) -> None:
    command = kvtier_command("stat", "--socket", str(node.socket), "--watch", "0.01")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        child.stdout.close()
        assert child.wait(20) == 0
        assert child.stderr
        assert b"Traceback" not in child.stderr.read()


def test_an_option_from_a_shell_variable_that_is_not_set(node: RunningNode) -> None:
    with node.start("serve", "--model", "") as serve:
        assert serve.wait() == 2
        assert serve.log == "kvtier: engine.model: is empty; give a value, or omit the option\n"
