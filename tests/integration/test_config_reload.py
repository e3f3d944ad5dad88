"""A running daemon takes its configuration anew: all of it, or nothing, and says what it did."""

import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtier.api.rpc.operator_client import local_operator
from kvtier.cli.main import main
from kvtier.core.plan import EngineLoad
from kvtier.testing.child import Child, await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import operator_pb2 as pb
from tests.integration.pattern import PatternEngine, in_threads

pytestmark = pytest.mark.slow

START = {"daemon.log_level": "warning", "cost.restore": "always", "ssd.write_budget": "0B"}


class Configured(RunningNode):
    """A node whose daemon has some of its settings in a file."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for key in START:
            self.settings.pop(key, None)
        self.path = directory / "kvtier.toml"
        self.write(START)

    def write(self, settings: Mapping[str, Any]) -> None:
        """Replace the file, as one should: at once."""
        text = "".join(
            f"[{section}]\n"
            + "".join(
                f"{key.partition('.')[2]} = {json.dumps(value)}\n"
                for key, value in settings.items()
                if key.startswith(f"{section}.")
            )
            for section in sorted({key.partition(".")[0] for key in settings})
        )
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.path)

    def serve(self) -> Child:
        """Start a daemon, and wait until it answers: at its level it does not say so."""
        child = self.start("serve", "--config", str(self.path))
        await_true(self.socket.exists, "it serves", 30)
        return child

    def tell(self, child: Child) -> Any:
        """Send SIGHUP; returns what became of it."""
        before = self.stat()["config"]["reloads"]
        child.send(signal.SIGHUP)

        def look() -> Any:
            told = self.stat()["config"]
            return told["last_reload"] if told["reloads"] > before else None

        return await_true(look, "it has read its configuration again")

    def in_force(self) -> dict[str, Any]:
        """Return what the daemon says that it goes by."""
        with local_operator(self.socket, 10) as stub:
            told = json.loads(stub.Config(pb.ConfigRequest(), timeout=10).json)
        return {key: each["value"] for key, each in told.items()}


@pytest.fixture
def node() -> Iterator[Configured]:
    with work_directory() as directory:
        yield Configured(directory)


def test_what_can_change_does(node: Configured) -> None:
    with node.serve() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1)
        assert engine.ask(1, load=EngineLoad()).plan.num_blocks == 4
        assert "write_budget_bytes" not in node.stat()["tiers"]["ssd"]["detail"]
        node.write(
            {"daemon.log_level": "info", "cost.restore": "never", "ssd.write_budget": "2GiB"}
        )
        told = node.tell(daemon)
        assert told["outcome"] == "applied", told
        assert told["changed"] == [
            f'daemon.log_level: "warning" to "info" ({node.path}:4)',
            f'ssd.write_budget: "0B" to "2GiB" ({node.path}:6)',
            f'cost.restore: "always" to "never" ({node.path}:2)',
        ]
        assert engine.ask(1, load=EngineLoad()).plan.num_blocks == 0
        assert node.stat()["tiers"]["ssd"]["detail"]["write_budget_day_bytes"] == 2 << 30
        await_true(lambda: "configuration changed" in daemon.log, "lines of that level are written")
        assert node.tell(daemon)["outcome"] == "unchanged"
        assert daemon.stop() == 0


def test_a_budget_that_is_lowered_stops_writes(node: Configured) -> None:
    with node.serve() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1, 8)
        node.await_blocks("ssd", 8)
        node.write(START | {"ssd.write_budget": "4KiB"})
        assert node.tell(daemon)["outcome"] == "applied"
        engine.store(2, 8)
        written = node.await_idle()["tiers"]["ssd"]
        assert written["blocks"] == 8, "what was written today is more than the budget"
        node.write(START)
        assert node.tell(daemon)["outcome"] == "applied"
        engine.store(3, 8)
        node.await_blocks("ssd", 16)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({"cpu.capacity": "1GiB"}, ["cpu.capacity: "]),
        (
            {"engine.block_tokens": "x", "ssd.gate": "2.0", "cost.split": "maybe"},
            ["ssd.gate: ", "cost.split: ", "engine.block_tokens: "],
        ),
        ({"ssd.io_threads": 9, "engine.dtype": "float16"}, ["ssd.io_threads", "engine.dtype"]),
    ],
)
def test_one_bad_key_and_nothing_changes(
    node: Configured, changes: dict[str, Any], reasons: list[str]
) -> None:
    node.settings.pop("cpu.capacity")
    node.settings["cpu.slab"] = "1MiB"
    node.write(START | {"cpu.capacity": "16MiB"})
    with node.serve() as daemon:
        before = node.in_force()
        wanted = {"daemon.log_level": "debug", "cost.restore": "never", "cpu.capacity": "16MiB"}
        node.write(START | wanted | changes)
        told = node.tell(daemon)
        assert told["outcome"] == "refused"
        for reason, begin in zip(told["reasons"], reasons, strict=True):
            assert reason.startswith(begin)
        assert told["changed"] == []
        refusal = 'event="configuration rejected'
        await_true(lambda: daemon.log.count(refusal) == len(reasons), "each reason has a line")
        assert node.in_force() == before
        node.write(START | {"daemon.log_level": "debug", "cpu.capacity": "16MiB"})
        assert node.tell(daemon)["outcome"] == "applied", "the next one counts for itself"
        assert daemon.stop() == 0


def test_a_file_that_is_no_good(node: Configured) -> None:
    with node.serve() as daemon:
        for spoil, said in (
            (lambda: node.path.write_text("[cost]\nrestore = "), "is not valid TOML"),
            (node.path.unlink, "No such file"),
            (node.path.mkdir, "is not a regular file"),
            (lambda: (node.path.rmdir(), os.mkfifo(node.path)), "is not a regular file"),
        ):
            spoil()
            told = node.tell(daemon)
            assert told["outcome"] == "refused"
            assert said in told["reasons"][0], told
        node.path.unlink()
        node.write(START | {"cost.restore": "never"})
        assert node.tell(daemon)["outcome"] == "applied"
        assert node.in_force()["cost.restore"] == "never"


def test_a_command_reloads_and_answers(
    node: Configured, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--connect", str(node.socket)]
    with node.serve():
        node.write(START | {"daemon.lease": "1min"})
        assert main(["config", "reload", *target]) == 0
        said = f'daemon.lease: "30s" to "1min" ({node.path}:5)\napplied\n'
        assert capsys.readouterr() == (said, "")
        assert main(["config", "reload", *target]) == 0
        assert capsys.readouterr() == ("no changes\n", "")
        assert main(["config", "show", "--running", *target]) == 0
        shown = capsys.readouterr().out
        assert re.search(rf'^lease = "1min" +# {node.path}:5$', shown, re.MULTILINE), shown
        node.write(START | {"daemon.allowed_uids": [0]})
        assert main(["config", "reload", *target]) == 1
        out, err = capsys.readouterr()
        assert "kvtier: daemon.allowed_uids: [] to [0]" in err
        assert out == "rejected, nothing was applied\n"
        assert main(["stat", *target]) == 0
        assert "configuration: reload refused at 20" in capsys.readouterr().out
        assert (
            main(["config", "check", "--machine", "--config", str(node.path), *node.arguments()])
            == 0
        )
        assert "a daemon is running here" in capsys.readouterr().out


def test_many_at_once_end_with_the_last_word(node: Configured) -> None:
    with node.serve() as daemon:
        with local_operator(node.socket, 10) as stub:

            def ask(number: int) -> None:
                node.write(START | {"daemon.lease": f"{number}s"}) if number == 40 else None
                daemon.send(signal.SIGHUP)
                json.loads(stub.Reload(pb.ReloadRequest(), timeout=30).json)

            in_threads([lambda number=number: ask(number) for number in range(33, 41)])
        assert node.in_force()["daemon.lease"] == "40s"
        assert 1 <= node.stat()["config"]["reloads"] <= 16
        assert daemon.stop() == 0


def test_a_signal_while_it_starts_and_while_it_stops(node: Configured) -> None:
    child = node.start("serve", "--config", str(node.path))
    with child:
        # SIGHUP is blocked before kvtier's first import, and handled once the daemon exists.
        status = Path(f"/proc/{child.pid}/status")
        hangup = 1 << (signal.SIGHUP - 1)

        def is_blocked() -> bool:
            mask = status.read_text().partition("SigBlk:")[2].split()[0]
            return bool(int(mask, 16) & hangup)

        await_true(is_blocked, "SIGHUP is blocked", 30)
        child.send(signal.SIGHUP)
        await_true(node.socket.exists, "it serves", 30)
        await_true(lambda: node.stat()["config"]["reloads"], "it has read it again", 30)
        child.send(signal.SIGTERM)
        child.send(signal.SIGHUP)
        assert child.wait() == 0
