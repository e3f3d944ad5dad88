"""An older and a newer kvtier against each other: processes of both, and a store that both open."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import Child, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.compat.newer import KEEPS, SPEAKS, newer_kvtier
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

OLD, NEW, LATER = 1, 2, 3
"""Prompts of four blocks: stored before an upgrade, after it, and after a rollback."""


@pytest.fixture(scope="module")
def speaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return newer_kvtier(tmp_path_factory.mktemp("speaks"), SPEAKS)


@pytest.fixture(scope="module")
def keeps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return newer_kvtier(tmp_path_factory.mktemp("keeps"), KEEPS)


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def started(node: RunningNode, environment: dict[str, str], **changes: str) -> Child:
    """Start a daemon of the version that an environment is of."""
    before, node.environment = node.environment, environment
    try:
        return node.daemon(**changes)
    finally:
        node.environment = before


def from_ssd(node: RunningNode, engine: PatternEngine, prompt: int) -> bool:
    """Tell whether a prompt is there, from the SSD alone and right to the last byte."""
    assert engine.client.wait_attached(30), "it joins whichever daemon there is"
    node.drop("cpu")
    tiers, _ = engine.load(prompt)
    assert tiers in ([], ["ssd"] * 4)
    node.await_idle()
    return bool(tiers)


def documents(node: RunningNode, end: str = "") -> dict[str, bytes]:
    """Return what is kept beside the blocks: what was learned, and the names of key spaces."""
    store = node.directory / "ssd"
    return {path.name.removesuffix(end): path.read_bytes() for path in store.glob(f"*.json{end}")}


def segments(node: RunningNode) -> set[str]:
    return {path.name for path in (node.directory / "ssd").glob("*.segment")}


def test_a_newer_engine_joins_an_older_daemon(node: RunningNode, speaks: dict[str, str]) -> None:
    script = Path(__file__).with_name("newer_engine.py")
    command = [sys.executable, str(script), str(node.socket), str(NEW)]
    with node.daemon(), PatternEngine(node.socket) as engine:
        with Child(command, node.directory / "newer.log", speaks) as newer:
            assert newer.wait() == 0, newer.log
            told = json.loads(newer.log.splitlines()[-1])
        assert told == {"version": "9.9.9", "stored": 4, "loaded": ["cpu"] * 4, "end": "complete"}
        assert engine.load(NEW) == (["cpu"] * 4, "complete"), "what it stored is everybody's"


def test_newer_tools_read_an_older_daemon_and_say_what_it_lacks(
    node: RunningNode, speaks: dict[str, str]
) -> None:
    with node.daemon():
        log = node.directory / "tools.log"
        with Child(kvtier_command("stat", "--connect", str(node.socket)), log, speaks) as child:
            assert child.wait() == 0, child.log
        with Child(kvtier_command("probe", "--connect", str(node.socket)), log, speaks) as child:
            assert child.wait() == 2, child.log
            assert "is too old for this command" in child.log


def test_an_upgrade_and_a_rollback_under_an_engine_that_stays(
    node: RunningNode, speaks: dict[str, str]
) -> None:
    with PatternEngineOf(node) as engine:
        with node.daemon() as daemon:
            assert engine.client.wait_attached(30)
            assert engine.store(OLD) == 4
            assert daemon.stop() == 0
        with started(node, speaks) as daemon:
            assert from_ssd(node, engine, OLD), "the cache survives the upgrade"
            assert node.stat()["version"] == "9.9.9"
            assert engine.store(NEW) == 4
            assert daemon.stop() == 0
        with node.daemon():
            assert from_ssd(node, engine, OLD)
            assert from_ssd(node, engine, NEW), "and the rollback"


def test_a_store_of_another_format_is_set_aside_and_found_again(
    node: RunningNode, keeps: dict[str, str]
) -> None:
    with PatternEngineOf(node) as engine:
        with node.daemon() as daemon:
            assert engine.client.wait_attached(30)
            assert engine.store(OLD) == 4
            assert daemon.stop() == 0
        old = documents(node)
        assert old.keys() == {"learned.json", "key_spaces.json"}
        with started(node, keeps) as daemon:
            assert not from_ssd(node, engine, OLD), "it does not read what it does not know"
            assert engine.store(NEW) == 4
            assert daemon.stop() == 0
        new, both = documents(node), segments(node)
        assert documents(node, ".aside") == old
        with node.daemon() as daemon:
            assert node.stat()["tiers"]["ssd"]["detail"]["files_set_aside_at_start"] == 1
            assert "cannot be read" not in daemon.log
            (space,) = node.stat()["key_spaces"]
            assert space["names"] == ["pattern"]
            assert from_ssd(node, engine, OLD), "the rollback finds what it had"
            assert not from_ssd(node, engine, NEW)
            assert engine.store(LATER) == 4
            assert both <= segments(node)
            assert daemon.stop() == 0
        assert documents(node, ".aside") == new
        assert documents(node)["learned.json"].startswith(b'{"version":1,')
        code, report = node.fsck()
        assert (code, report["faults"], report["foreign_files"]) == (0, 0, 0)
        assert report["set_aside_files"] == 1
        with started(node, keeps) as daemon:
            assert from_ssd(node, engine, NEW), "and nothing of the newer one was lost"
            assert daemon.stop() == 0
        assert documents(node)["learned.json"].startswith(b'{"version":2,')


def test_a_drop_takes_what_is_set_aside_as_well(node: RunningNode, keeps: dict[str, str]) -> None:
    with started(node, keeps) as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(NEW) == 4
        assert daemon.stop() == 0
    with node.daemon():
        assert segments(node)
        words = ["drop", "--connect", str(node.socket), "--tier", "ssd", "--tenant", "somebody"]
        with Child(kvtier_command(*words), node.directory / "drop.log") as child:
            assert child.wait() == 0, child.log
        assert not segments(node), "nobody could say whose blocks are in it"


def test_what_is_set_aside_makes_room_before_anything_else(
    node: RunningNode, keeps: dict[str, str]
) -> None:
    node.settings |= {"ssd.capacity": "4MiB", "ssd.segment": "1MiB"}
    with started(node, keeps) as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(NEW) == 4
        assert daemon.stop() == 0
    (old,) = segments(node)
    with node.daemon(), PatternEngine(node.socket) as engine:
        for num_prompts in range(1, 12):
            assert engine.store(100 + num_prompts, 40) == 40
            node.await_idle()
            if old not in segments(node):
                break
        print(f"its space was taken back after {num_prompts} prompts")
        assert 2 < num_prompts < 11
        assert node.stat()["tiers"]["ssd"]["blocks"] == 40 * num_prompts, "nothing else went"


def test_with_a_maximum_age_nothing_is_set_aside(node: RunningNode, keeps: dict[str, str]) -> None:
    with started(node, keeps) as daemon, PatternEngine(node.socket) as engine:
        assert engine.store(NEW) == 4
        assert daemon.stop() == 0
    with node.daemon(ssd__max_age="1h"):
        assert not segments(node), "nobody here could tell when it is too old"


def test_a_key_of_a_newer_version_is_refused_by_name(node: RunningNode) -> None:
    path = node.directory / "kvtier.toml"
    path.write_text('[ssd]\ncapacity = "1GiB"\ncompression = "zstd"\n')
    words = kvtier_command("config", "check", "--config", str(path))
    with Child(words, node.directory / "check.log", {"NO_COLOR": "1"}) as child:
        assert child.wait() == 2, child.log
        assert "ssd.compression" in child.log
        assert f"{path}" in child.log


class PatternEngineOf(PatternEngine):
    """One that is there before its daemon."""

    def __init__(self, node: RunningNode) -> None:
        super().__init__(node.socket)

    def __enter__(self) -> "PatternEngineOf":
        self.client.start()
        return self
