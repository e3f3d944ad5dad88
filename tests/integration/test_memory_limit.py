"""A container's memory limit: one that is too small is said, before the kernel kills for it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import Child, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.memory_group import memory_group
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def test_one_that_is_too_small_is_said_and_nobody_is_killed(directory: Path) -> None:
    arguments = RunningNode(directory).arguments(cpu__capacity="256MiB")
    with memory_group(400 * MIB) as group:
        command = [*group.enter, *kvtier_command("serve", *arguments)]
        with Child(command, directory / "log") as daemon:
            assert daemon.wait(60) == 2, daemon.log
        assert "cpu.capacity: 256MiB plus 256MiB for the rest exceed the" in daemon.log
        assert "raise the container's limit" in daemon.log
        doctor = kvtier_command("doctor", "--json", *arguments)
        done = subprocess.run(
            [*group.enter, *doctor], capture_output=True, text=True, check=False, timeout=60
        )
        found = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
        assert found["memory"]["verdict"] == "fail"
        assert "raise the container's limit" in found["memory"]["remedy"]
        assert group.num_killed == 0


def test_one_as_the_documents_have_it_holds_a_full_arena(directory: Path) -> None:
    node = RunningNode(directory, {"cpu.capacity": "64MiB", "ssd.capacity": "128MiB"})
    with memory_group((64 + 512) * MIB) as group:
        command = [*group.enter, *kvtier_command("serve", *node.arguments())]
        with Child(command, directory / "log") as daemon:
            daemon.await_log('event="arena reserved"')
            with PatternEngine(node.socket) as engine:
                for prompt in range(40):  # the arena and as much again, which the SSD takes
                    engine.store(prompt, 400)
                node.await_idle(60)
            told = node.stat()["tiers"]["cpu"]
            print(f"{group.used_bytes >> 20} MiB of 576 MiB, {told['used_bytes'] >> 20} in blocks")
            assert told["used_bytes"] > 50 * MIB
            assert group.used_bytes >= told["used_bytes"], "the arena is memory of this group"
            assert daemon.stop() == 0
        assert group.num_killed == 0
