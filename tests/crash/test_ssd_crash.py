"""A process killed at any step of a write, a removal or a start leaves a tier that is right."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ssd_writer import CAPACITY_BYTES, SEGMENT_BYTES, size_of

from kvtier.core.identity import unpack_headers
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import MissReason
from kvtier.tiers.ssd import SsdTier

WRITER = Path(__file__).with_name("ssd_writer.py")
IN_A_BLOCK = ("record.write", 3)
"""Between two operations of one block: its header is on the disk, its payload is not."""

POINTS = [
    ("segment.create", 1),
    ("segment.create", 3),
    ("segment.header", 1),
    ("segment.header", 4),
    ("record.write", 1),
    IN_A_BLOCK,
    ("record.write", 12),
    ("record.publish", 1),
    ("record.publish", 9),
    ("segment.sync", 2),
    ("segment.footer", 1),
    ("segment.footer", 3),
    ("segment.unlink", 1),
    ("footer.drop", 1),
    ("record.remove", 1),
    ("record.remove", 2),
    ("never", 1),
]


def run_writer(
    directory: Path, step: str, occurrence: int, mode: str, durability: str
) -> tuple[int, list[tuple[str, bytes]]]:
    """Run the child; returns its exit status and what it said."""
    child = subprocess.run(
        [sys.executable, WRITER, directory, step, str(occurrence), mode, durability],
        stdout=subprocess.PIPE,
        check=False,
        timeout=100,
    )
    lines = [line.split() for line in child.stdout.decode().splitlines()]
    return child.returncode, [(word, bytes.fromhex(block_hash)) for word, block_hash in lines]


def promised(said: list[tuple[str, bytes]]) -> tuple[set[bytes], set[bytes]]:
    """Return the blocks that must be there, and those that must not."""
    there: set[bytes] = set()
    gone: set[bytes] = set()
    for word, block_hash in said:
        if word == "stored":
            there.add(block_hash)
        else:
            there.discard(block_hash)
        if word == "removed":
            gone.add(block_hash)
    return there, gone


def check(
    directory: Path, said: list[tuple[str, bytes]], *, may_evict: bool, is_torn: bool = False
) -> None:
    there, gone = promised(said)
    blocks = [make_block(number, size_of(number)) for number in range(24)]
    tier = SsdTier(directory, CAPACITY_BYTES, SEGMENT_BYTES)
    try:
        files = {path.name: path.stat() for path in directory.iterdir()}
        segments = [stat for name, stat in files.items() if name.endswith(".segment")]
        assert len(files) == len(segments) + 1, "only the lock beside the segments"
        assert tier.usage().used_bytes == sum(stat.st_size for stat in segments)
        assert sum(stat.st_blocks * 512 for stat in files.values()) <= CAPACITY_BYTES
        assert tier.usage().num_blocks == len(unpack_headers(tier.headers()))
        verdicts = fetch(tier, *blocks)
        assert set(verdicts) <= {None, MissReason.ABSENT, MissReason.CHECKSUM}
        if is_torn:
            assert MissReason.CHECKSUM in verdicts
        served = {
            block.header.block_hash
            for block, verdict in zip(blocks, verdicts, strict=True)
            if verdict is None
        }
        assert not served & gone
        if not may_evict:
            assert there <= served
        store(tier, blocks[0], blocks[2])
        assert fetch(tier, blocks[0], blocks[2]) == [None, None]
        assert not tier.remove([make_block(99).header.block_hash], soon()).num_blocks
    finally:
        tier.close()


@pytest.mark.slow
@pytest.mark.parametrize(("step", "occurrence"), POINTS)
def test_killed_at_a_step(tmp_path: Path, step: str, occurrence: int) -> None:
    durability = "batch" if step == "segment.sync" else "segment"
    status, said = run_writer(tmp_path / "ssd", step, occurrence, "auto", durability)
    assert status == (0 if step == "never" else -signal.SIGKILL), said
    # Killed when it had given up a segment, but before the write returned that says so.
    may_evict = step in {"segment.unlink", "segment.create", "segment.header"}
    is_torn = (step, occurrence) == IN_A_BLOCK
    check(tmp_path / "ssd", said, may_evict=may_evict, is_torn=is_torn)


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path) -> None:
    for occurrence in (2, 5, 1, 4):
        status, said = run_writer(tmp_path / "ssd", "record.write", occurrence, "off", "segment")
        assert status == -signal.SIGKILL
    check(tmp_path / "ssd", said, may_evict=True)
