"""A process killed at any step of the store, or at any moment, leaves a tier that is right.

A directory lives through several kills, one after the other; each time a copy of it is opened and
compared with what the killed process had said. The store promises that nothing it reported as
stored is lost to a kill, so that is what is asserted, not a share of it.
"""

import multiprocessing
import random
import shutil
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ssd_writer
from ssd_writer import CAPACITIES_BYTES, COUNT, NUM_BLOCKS, SEGMENT_BYTES, block

from kvtier.core.identity import unpack_headers
from kvtier.testing.block import make_block
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, MissReason
from kvtier.tiers.ssd.store import SsdTier

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["ssd_writer"])
"""Hundreds of children: each begins with everything imported, which takes longer than its work."""

ROUNDS = 200
ROUNDS_OF_A_LIFE = 10
DELAY_MAX_S = 0.6
"""A child needs about as long for its work, of which a third goes by before it begins."""

TORN = {MissReason.CHECKSUM, MissReason.HEADER}


@dataclass(frozen=True)
class Kill:
    """When a child is killed: before a step of the store, or after a time."""

    step: str = "never"
    occurrence: int = 1
    delay_s: float = 0.0


@dataclass
class Ledger:
    """What a store must hold, may hold and must not hold, after what was said."""

    there: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    is_giving_up: bool = False
    """It was killed in a call that gave up a segment, before it could say which blocks went."""

    def hear(self, lines: Sequence[str]) -> None:
        self.is_giving_up = False
        tenants = {number for number in range(NUM_BLOCKS) if number % 7 == 0}
        for word, *numbers in map(str.split, lines):
            named = set(map(int, numbers))
            if word in {"writing", "stored"}:
                self.gone -= named
            if word == "stored":
                self.there |= named
            if word in {"removing", "evicted"}:
                self.there -= named
            if word == "purging":
                self.there -= tenants
            if word in {"removed", "purged"}:
                self.gone |= named or tenants
            if word in {"giving_up", "wrote", "removed", "purged"}:
                self.is_giving_up = word == "giving_up"


@pytest.fixture(scope="module")
def blocks() -> list[BlockWrite]:
    return [block(number) for number in range(NUM_BLOCKS)]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """The steps of the store by name, and how many of each there are in the work of a child."""
    directory = tmp_path_factory.mktemp("count")
    lines = run_writer(directory / "ssd", "tight", 1, Kill(COUNT))
    pairs = [line.split() for line in lines if "." in line]
    return {name: int(count) for name, count in pairs}


def run_writer(directory: Path, room: str, seed: int, kill: Kill) -> list[str]:
    """Run a child until it is killed; returns what it said."""
    with tempfile.NamedTemporaryFile("r") as said:
        child = FORKS.Process(
            target=ssd_writer.main,
            args=(Path(said.name), directory, room, seed, kill.step, kill.occurrence, kill.delay_s),
        )
        child.start()
        child.join(60)
        output = said.read()
        assert child.exitcode in {-signal.SIGKILL, -signal.SIGALRM}, (child.exitcode, output)
        child.close()
    return output.splitlines()


def reopened(
    directory: Path, room: str, ledger: Ledger, blocks: Sequence[BlockWrite]
) -> tuple[int, int]:
    """Check a store against the ledger; returns how many blocks should be there, and are."""
    capacity_bytes = CAPACITIES_BYTES[room]
    tier = SsdTier(directory, capacity_bytes, SEGMENT_BYTES)
    try:
        files = {path.name: path.stat() for path in directory.iterdir()}
        segments = [stat for name, stat in files.items() if name.endswith(".segment")]
        assert set(files) <= {"lock"} | {name for name in files if name.endswith(".segment")}
        assert tier.usage().used_bytes == sum(stat.st_size for stat in segments)
        assert sum(stat.st_blocks * 512 for stat in files.values()) <= capacity_bytes
        assert tier.usage().num_blocks == len(unpack_headers(tier.headers()))
        verdicts = fetch(tier, *blocks)  # fails for a wrong byte
        assert set(verdicts) <= {None, MissReason.ABSENT} | TORN
        served = {number for number, verdict in enumerate(verdicts) if verdict is None}
        assert not served & ledger.gone, "what was removed stays away"
        wanted = set() if ledger.is_giving_up else set(ledger.there)
        lost = wanted - served
        print(f"{len(wanted)} should be there, {len(lost)} are lost: {sorted(lost)}")
        assert not lost
        fresh = make_block(NUM_BLOCKS + 1, 30_000)
        store(tier, fresh)
        assert fetch(tier, fresh) == [None]
        torn = [blocks[n] for n, verdict in enumerate(verdicts) if verdict in TORN]
        store(tier, *torn)
        assert set(fetch(tier, *torn)) <= {None}, "a torn block may be stored again"
        assert not tier.remove([make_block(NUM_BLOCKS + 2).header.block_hash], soon()).num_blocks
    finally:
        tier.close()
    ledger.there &= served
    return len(wanted), len(wanted - lost)


def live(
    directory: Path, room: str, seed: int, kills: Sequence[Kill], blocks: Sequence[BlockWrite]
) -> tuple[int, int]:
    """Let a store live through kills, checking a copy of it after each."""
    ledger = Ledger()
    num_wanted = num_served = 0
    for number, kill in enumerate(kills):
        print(f"{room} store of seed {seed}, round {number}: {kill}")
        ledger.hear(run_writer(directory / "ssd", room, seed + number, kill))
        copy = directory / f"copy{number}"
        if (directory / "ssd").is_dir():
            shutil.copytree(directory / "ssd", copy)
            wanted, served = reopened(copy, room, ledger, blocks)
            num_wanted, num_served = num_wanted + wanted, num_served + served
            shutil.rmtree(copy)
    return num_wanted, num_served


@pytest.mark.slow
@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_killed_before_each_step(
    tmp_path: Path, room: str, steps: dict[str, int], blocks: list[BlockWrite]
) -> None:
    assert {"segment.create", "record.write", "record.publish", "segment.unlink"} <= set(steps)
    kills = [Kill(step, 1 + count // 2) for step, count in steps.items()]
    print(live(tmp_path, room, 50, kills, blocks))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("room", ["roomy", "tight"])
def test_killed_at_every_step_and_at_any_moment(
    tmp_path: Path, room: str, steps: dict[str, int], blocks: list[BlockWrite]
) -> None:
    seed = {"roomy": 1000, "tight": 2000}[room]
    choose = random.Random(seed)
    names = list(steps) * ROUNDS
    kills = []
    for number in range(ROUNDS // 2):
        at_a_step = Kill(names[number], choose.randint(1, steps[names[number]]))
        at_a_moment = Kill(delay_s=choose.uniform(0.01, DELAY_MAX_S))
        kills.append(at_a_moment if number % 2 else at_a_step)
    lives = [kills[at : at + ROUNDS_OF_A_LIFE] for at in range(0, len(kills), ROUNDS_OF_A_LIFE)]

    def run(number: int) -> tuple[int, int]:
        directory = tmp_path / str(number)
        directory.mkdir()
        return live(directory, room, seed + 100 * number, lives[number], blocks)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run, range(len(lives))))
    num_wanted, num_served = (sum(column) for column in zip(*results, strict=True))
    print(f"{len(kills)} rounds: {num_served} of {num_wanted} published blocks are there")
    assert num_wanted > 10 * len(kills)
    assert num_served >= 0.99 * num_wanted
