"""A store on a directory, and what tests do to its files."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.core.identity import NO_TENANT
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.pool import METADATA_BYTES
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 256 << 10
CAPACITY_BYTES = 4 * SEGMENT_BYTES + METADATA_BYTES
BLOCK_BYTES = 20_000
"""Ten of them to a segment: with its header page a record takes 24 KiB."""

RECORD_BYTES = 24_576


class Opener:
    """Opens tiers on one directory, and closes what a test leaves open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tiers: list[SsdTier] = []

    def __call__(
        self, capacity_bytes: int = CAPACITY_BYTES, options: SsdOptions | None = None
    ) -> SsdTier:
        tier = SsdTier(self.directory, capacity_bytes, SEGMENT_BYTES, options)
        self.tiers.append(tier)
        return tier

    def disk_bytes(self) -> int:
        """Return what the directory's files have allocated."""
        return sum(path.stat().st_blocks * 512 for path in self.directory.iterdir())

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("*.segment"))


def blocks_of(numbers: Sequence[int], tenant: bytes = NO_TENANT) -> list[BlockWrite]:
    return [make_block(number, BLOCK_BYTES, tenant=tenant) for number in numbers]


def present(tier: SsdTier, blocks: Sequence[BlockWrite]) -> list[bool]:
    return tier.contains([block.header.block_hash for block in blocks], soon())


def damage(path: Path, offset: int, content: bytes | None = None) -> None:
    """Flip a bit of a file, or overwrite a part of it."""
    with path.open("r+b") as file:
        file.seek(offset)
        changed = content if content is not None else bytes([file.read(1)[0] ^ 1])
        file.seek(offset)
        file.write(changed)
