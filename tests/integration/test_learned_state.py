"""What was learned of tiers and engines outlives a restart; a damaged file of it does no harm."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli.main import main
from kvtier.core.plan import EngineLoad, StepSample
from kvtier.daemon.persistence.learned_state import FILE_NAME
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.shim.storage import Action, Call, Fault, StorageShim, fail

pytestmark = pytest.mark.slow

STEPS = [StepSample(new, 0, new * new / 2.0, 0, new * 1e-4) for new in (256, 512, 1024, 2048)] * 16


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def file_of(node: RunningNode) -> Path:
    return node.directory / "ssd" / FILE_NAME


def learn(node: RunningNode) -> Any:
    """Run a daemon long enough to learn an engine's speed; returns what it says of it."""
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1)

        def learned() -> dict[str, float] | None:
            engine.client.note_steps(STEPS, EngineLoad())
            (each,) = node.stat()["cost"]["engines"].values()
            return each if each["samples"] >= 64 else None

        await_true(learned, "an engine's speed is learned")
        engine.client.close()
        node.await_idle()
        (last,) = node.stat()["cost"]["engines"].values()
        assert daemon.stop() == 0
    return last


def test_an_engines_speed_is_known_after_a_restart(node: RunningNode) -> None:
    before = learn(node)
    assert file_of(node).stat().st_mode & 0o777 == 0o600
    assert file_of(node).stat().st_size < 32 << 10
    code, report = node.fsck()
    assert code == 0, report
    with node.daemon():
        (after,) = node.stat()["cost"]["engines"].values()
        assert after["tokens_per_s"] == pytest.approx(before["tokens_per_s"], rel=0.3)


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def absurd_numbers(path: Path) -> None:
    path.write_text(path.read_text().replace("e-0", "e+300").replace("0.0", "NaN"))


def other_shapes(path: Path) -> None:
    path.write_text(json.dumps({"version": 1, "learned": {"cost": {"restore": [1]}, "x": 7}}))


def too_deep(path: Path) -> None:
    path.write_text("[" * 30_000)


def too_long(path: Path) -> None:
    path.write_text(" " * (1 << 20))


def elsewhere(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    names = path.with_name("key_spaces.json")
    names.unlink(missing_ok=True)
    os.mkfifo(names)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    "damage",
    [
        garbage,
        absurd_numbers,
        other_shapes,
        too_deep,
        too_long,
        elsewhere,
        a_directory,
        a_pipe,
        cut,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_file_is_ignored(learned_once: Path, damage: Callable[[Path], None]) -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        path = file_of(node)
        path.parent.mkdir(mode=0o700)
        path.write_bytes(learned_once.read_bytes())
        damage(path)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            assert engine.store(1) == 4
            assert engine.load(1) == (["cpu"] * 4, "complete")
            for learned in node.stat()["cost"]["engines"].values():
                assert 0 < learned["tokens_per_s"] < 1e12, "a number that can be"
            assert "Traceback" not in daemon.log
            assert daemon.stop() == 0


@pytest.fixture(scope="module")
def learned_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file as a daemon writes it."""
    with work_directory() as directory:
        node = RunningNode(directory)
        learn(node)
        copy = tmp_path_factory.mktemp("learned") / FILE_NAME
        copy.write_bytes(file_of(node).read_bytes())
    return copy


def test_a_disk_that_is_attached_brings_what_was_learned_where_nothing_is_known(
    node: RunningNode, learned_once: Path
) -> None:
    to = ("ssd", "--connect", str(node.socket))

    def learned() -> dict[str, float]:
        (engine,) = node.stat()["cost"]["engines"].values()
        return engine

    with node.daemon() as daemon:
        assert main(["tier", "detach", *to]) == 0
        shutil.copy(learned_once, file_of(node))
        assert main(["tier", "attach", *to]) == 0
        assert learned()["tokens_per_s"] > 0
        with PatternEngine(node.socket) as engine:
            engine.client.note_steps(STEPS, EngineLoad())
            await_true(lambda: samples(node) >= len(STEPS), "this run learns its own")
            assert main(["tier", "detach", *to]) == 0
            shutil.copy(learned_once, file_of(node))
            own = learned()
            assert main(["tier", "attach", *to]) == 0
            assert learned()["samples"] >= own["samples"], "what is newer stays"
        said = r'from the attached directory" of=(.*) not_of=(.*)'
        first, second = re.findall(said, daemon.log)
        assert "cost" in first[0]
        assert "cost" in second[1]
        assert daemon.stop() == 0


FULL = {
    Call.ALLOCATE: fail(errno.ENOSPC),
    Call.WRITE: fail(errno.ENOSPC),
    Call.STATVFS: Fault(Action.FILL),
}


def full(_path: Path, shim: StorageShim) -> None:
    shim.set(FULL)


def read_only(_path: Path, shim: StorageShim) -> None:
    shim.set({call: fail(errno.EROFS) for call in (Call.OPEN_WRITE, Call.UNLINK, Call.WRITE)})


def no_directory(path: Path, _shim: StorageShim) -> None:
    shutil.rmtree(path.parent)


def a_directory_in_the_way(path: Path, _shim: StorageShim) -> None:
    path.with_name(FILE_NAME + ".new").mkdir()


@pytest.mark.parametrize(
    "harm", [full, read_only, no_directory, a_directory_in_the_way], ids=lambda harm: harm.__name__
)
def test_what_cannot_be_saved_is_said_and_hurts_nobody(
    harm: Callable[[Path, StorageShim], None],
) -> None:
    """What was saved before stays as it was, and the daemon stops as always."""
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        node = RunningNode(directory, environment=shim.environment)
        path = file_of(node)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            await_true(path.exists, "it is saved at the start")
            engine.client.note_steps(STEPS, EngineLoad())
            await_true(lambda: samples(node) >= len(STEPS), "there is something new")
            before = path.read_bytes()
            harm(path, shim)
            engine.client.close()
            assert daemon.stop() == 0
            assert "learned state cannot be saved" in daemon.log
            assert "Traceback" not in daemon.log
        shim.clear()
        if path.parent.exists():
            assert path.read_bytes() == before
            assert not path.with_name(FILE_NAME + ".new").is_file(), "nothing half written"


def samples(node: RunningNode) -> int:
    return sum(each["samples"] for each in node.stat()["cost"]["engines"].values())
