"""The child of test_ssd_crash: works on an SSD tier, says what is done, and is killed.

Before each step of the store the hook counts; at the one it was told, the process kills itself. Or
a timer does, whose signal nobody catches: at any moment, in the middle of a system call too. Who
gets to the end of the work is killed there, with nothing closed.

It says a line in one system call before and after each thing it does, so that what is said was so:
``writing N``, ``stored N``, ``evicted N``, ``removing N``, ``removed N``, ``purging``, ``purged``,
``giving_up`` before a file is removed, and ``wrote`` once a write has returned and said all.
"""

import os
import random
import signal
from collections import Counter
from pathlib import Path

from kvtier.core.identity import NO_TENANT, Selection, tenant_digest
from kvtier.testing.block import make_block, read_of
from kvtier.testing.tier_contract import soon
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import Durability, SsdOptions
from kvtier.tiers.ssd.store import SsdTier

SEGMENT_BYTES = 512 << 10
CAPACITIES_BYTES = {"roomy": 16 << 20, "tight": 2 << 20}
"""Roomy: nothing is ever given up. Tight, of three segments: one is, all the time."""

NUM_BLOCKS = 96
NUM_ACTIONS = 50
SIZES = (1_000, 40_000, 150_000, 9_000, 4_096)
TENANT = tenant_digest("of whom everything is purged")
COUNT = "count"
"""Instead of a step: tell at the end which steps there were, and how many of each."""


def block(number: int) -> BlockWrite:
    tenant = TENANT if number % 7 == 0 else NO_TENANT
    return make_block(number, SIZES[number % len(SIZES)], tenant=tenant)


def say(word: str, *numbers: int) -> None:
    lines = [f"{word} {number}\n" for number in numbers] or [f"{word}\n"]
    os.write(1, "".join(lines).encode())


class Work:
    def __init__(self, tier: SsdTier, seed: int) -> None:
        self._tier = tier
        self._choose = random.Random(seed)
        self._blocks = [block(number) for number in range(NUM_BLOCKS)]
        self._numbers = {each.header.block_hash: n for n, each in enumerate(self._blocks)}

    def run(self) -> None:
        for _ in range(NUM_ACTIONS):
            choice = self._choose.random()
            if choice < 0.7:
                self._write()
            elif choice < 0.85:
                self._read()
            elif choice < 0.93:
                self._remove()
            elif choice < 0.97:
                self._scrub()
            else:
                self._purge()

    def _some(self) -> list[int]:
        return self._choose.sample(range(NUM_BLOCKS), self._choose.randrange(1, 5))

    def _write(self) -> None:
        numbers = self._some()
        say("writing", *numbers)
        report = self._tier.write([self._blocks[number] for number in numbers], soon())
        outcomes = zip(numbers, report.outcomes, strict=True)
        if evicted := [self._numbers[block_hash] for block_hash in report.evicted]:
            say("evicted", *evicted)
        if stored := [number for number, outcome in outcomes if outcome is WriteOutcome.STORED]:
            say("stored", *stored)
        say("wrote")

    def _read(self) -> None:
        """Have blocks that are worth being moved when their segment is given up."""
        self._tier.read([read_of(self._blocks[number]) for number in range(12)], soon())

    def _remove(self) -> None:
        numbers = self._some()
        say("removing", *numbers)
        self._tier.remove([self._blocks[n].header.block_hash for n in numbers], soon())
        say("removed", *numbers)

    def _scrub(self) -> None:
        self._tier.scrub(SEGMENT_BYTES, soon())
        say("wrote")

    def _purge(self) -> None:
        say("purging")
        self._tier.purge(Selection(tenant=TENANT), soon())
        say("purged")


def main(
    output: Path, directory: Path, room: str, seed: int, step: str, occurrence: int, delay_s: float
) -> None:
    """Work until killed; what is said goes to ``output``."""
    os.dup2(os.open(output, os.O_WRONLY), 1)
    counts: Counter[str] = Counter()

    def hook(reached: str) -> None:
        counts[reached] += 1
        if reached == "segment.unlink":
            say("giving_up")
        if reached == step and counts[step] == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    choose = random.Random(seed)
    options = SsdOptions(
        choose.choice([DirectIO.AUTO, DirectIO.AUTO, DirectIO.OFF]),
        choose.choice([Durability.SEGMENT, Durability.SEGMENT, Durability.BATCH]),
        hook=hook,
    )
    if delay_s:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    tier = SsdTier(directory, CAPACITIES_BYTES[room], SEGMENT_BYTES, options)
    Work(tier, seed).run()
    if step == COUNT:
        for name, count in counts.items():
            say(name, count)
    os.kill(os.getpid(), signal.SIGKILL)
