"""The child of test_ssd_crash: works on an SSD tier, says what is done, and is killed at a step."""

import os
import signal
import sys
from pathlib import Path

from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import WriteOutcome
from kvtier.tiers.ssd import DirectIO, Durability, SsdOptions, SsdTier

SEGMENT_BYTES = 8 << 20
CAPACITY_BYTES = 4 * SEGMENT_BYTES
"""Room for three segments, with what is kept back for the rest."""

SIZES = [300_000, 5_000_000, 1_000, 700_000]
"""The second takes more than one operation from unaligned memory: it can be torn."""


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def say(word: str, block_hash: bytes) -> None:
    """Tell the parent in one system call, so that a line is there or not."""
    os.write(1, f"{word} {block_hash.hex()}\n".encode())


def work(tier: SsdTier) -> None:
    for number in range(24):
        block = make_block(number, size_of(number))
        report = tier.write([block], soon())
        for block_hash in report.evicted:
            say("evicted", block_hash)
        if report.outcomes == (WriteOutcome.STORED,):
            say("stored", block.header.block_hash)
        if number % 5 == 4:
            gone = make_block(number - 2, size_of(number - 2)).header.block_hash
            say("removing", gone)
            tier.remove([gone], soon())
            say("removed", gone)


def main() -> None:
    directory, step, occurrence, mode, durability = sys.argv[1:]
    remaining = int(occurrence)

    def hook(reached: str) -> None:
        nonlocal remaining
        remaining -= reached == step
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    options = SsdOptions(DirectIO(mode), Durability(durability), hook=hook)
    tier = SsdTier(Path(directory), CAPACITY_BYTES, SEGMENT_BYTES, options)
    work(tier)
    tier.close()


if __name__ == "__main__":
    main()
