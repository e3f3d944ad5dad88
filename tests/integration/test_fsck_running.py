"""``kvtier fsck`` and the scrub on a store that a daemon has open."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import await_true, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def fsck(node: RunningNode, *options: str) -> subprocess.CompletedProcess[str]:
    command = kvtier_command("fsck", "--connect", str(node.socket), *options)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def flip_a_bit(node: RunningNode, payload: bytes) -> None:
    """Damage the block with this payload where it lies."""
    for path in (node.directory / "ssd").glob("*.segment"):
        at = path.read_bytes().find(payload)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + len(payload) // 2)
                old = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([old[0] ^ 1]))
            return
    raise AssertionError("the block is in no file")


def test_a_damaged_block_is_found_and_its_neighbours_stay(directory: Path) -> None:
    node = RunningNode(directory, {"ssd.scrub_rate": "0B"})
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1, 6)
        node.await_blocks("ssd", 6)
        told = fsck(node)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith("verified 6 blocks, ")
        assert "no damaged blocks" in told.stdout
        node.drop("cpu")  # or the damaged block would be written again from there
        flip_a_bit(node, engine.payloads(1, 6)[3])
        told = fsck(node, "--json")
        document = json.loads(told.stdout)
        assert document["damaged_blocks"] == 1
        assert document["damaged"] == [engine.chain(1, 6)[3].hex()]
        assert node.stat()["tiers"]["ssd"]["blocks"] == 5
        assert node.metric("kvtier_quarantined_blocks_total", tier="ssd") == 1
        assert node.metric("kvtier_scrubbed_bytes_total") > 0
        assert json.loads(fsck(node, "--json").stdout)["damaged_blocks"] == 0
        node.drop("cpu")
        assert engine.load(1, 6) == (["ssd"] * 3, "absent")
        assert engine.store(1, 6) == 6
        node.await_blocks("ssd", 6)


def test_the_scrub_finds_it_unasked(directory: Path) -> None:
    node = RunningNode(directory, {"ssd.scrub_rate": "4MiB"})
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1, 6)
        node.await_blocks("ssd", 6)
        node.drop("cpu")  # or the damaged block would be written again from there
        flip_a_bit(node, engine.payloads(1, 6)[3])
        await_true(lambda: node.stat()["tiers"]["ssd"]["blocks"] == 5, "it was found", 20)
        assert node.metric("kvtier_evicted_blocks_total", tier="ssd", reason="corrupt") == 1


def test_without_an_ssd_tier(directory: Path) -> None:
    node = RunningNode(directory, {"ssd.enabled": "false"})
    with node.daemon():
        told = fsck(node)
        assert told.returncode == 2
        assert "the daemon has no SSD tier" in told.stderr
        assert told.stderr.count("\n") == 1


def test_without_a_daemon(directory: Path) -> None:
    told = fsck(RunningNode(directory))
    assert told.returncode == 2
    assert "kvtier serve" in told.stderr


def test_options_of_a_stopped_store_are_refused(directory: Path) -> None:
    node = RunningNode(directory, {})
    for words in (["--repair"], ["--key-file", "/none"], ["--directory", "/none"]):
        told = fsck(node, *words)
        assert told.returncode == 2
        assert told.stderr.startswith(f"kvtier: {words[0]}: not valid with --connect")
