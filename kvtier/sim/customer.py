"""What a simulated engine does all day: looks up, loads, copies, stores, and sometimes fails to.

Each job is a generator that yields how long to wait, in nanoseconds, so that any number of jobs
interleave in any order under one seed.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from kvtier.errors import DaemonUnavailable
from kvtier.node import action as ac
from kvtier.sim.world import MS, TENANTS, World
from kvtier.testing.fake_engine import Blocks, FakeEngine, FakeLoad

__all__ = ["Customer", "Job", "Tally"]

Job = Generator[int, None, None]
"""Yields how long to wait before it is resumed."""

_DOCUMENTS = 5
_PROMPT_BLOCKS_MAX = 14


@dataclass(slots=True)
class Tally:
    """What came of a run, so that one can see that it got anywhere."""

    served: dict[str, int] = field(default_factory=dict)
    """Blocks accepted, by tier."""
    ends: dict[str, int] = field(default_factory=dict)
    """Loads, by why they ended."""

    def count(self, load: FakeLoad) -> None:
        """Add one load."""
        for tier in load.accepted:
            self.served[tier] = self.served.get(tier, 0) + 1
        end = load.end or "given_up"
        self.ends[end] = self.ends.get(end, 0) + 1


class Customer:
    """One engine and its habits."""

    def __init__(self, engine: FakeEngine, world: World, tally: Tally) -> None:
        self.engine = engine
        self._draw = world.draw
        self._weather = world.weather
        self._tally = tally

    def prompt(self) -> Blocks:
        """Return a chain that begins like others: some of a document, then perhaps its own."""
        draw = self._draw
        document = draw.randrange(_DOCUMENTS)
        shared = draw.randint(1, _PROMPT_BLOCKS_MAX)
        own = draw.choice((0, 0, 1, 3))
        numbers = [1000 * document + place for place in range(shared)]
        numbers += [draw.randrange(100_000, 100_020) for _ in range(own)]
        return self.engine.chain(numbers, draw.choice(TENANTS))

    def work(self) -> Job:
        """Serve one prompt after the other until the daemon is gone."""
        while True:
            yield self._draw.randint(1, 30) * MS
            try:
                yield from self._serve(self.prompt())
            except DaemonUnavailable:
                return

    def _serve(self, blocks: Blocks) -> Job:
        call = self.engine.lookup(blocks, within_ns=self._draw.randint(10, 200) * MS)
        while call not in self.engine.stage.answers:
            yield from self._wait()
        found = self.engine.answer(call)
        assert isinstance(found, ac.Found), found
        num_loaded = 0
        if found.num_blocks:
            first = self._draw.choice((0, 0, 0, found.num_blocks // 2))
            load = self.engine.load(blocks, first, within_ns=self._draw.randint(5, 300) * MS)
            yield from self._take(load)
            self._tally.count(load)
            num_loaded = first + len(load.accepted)
        yield self._draw.randint(0, 10) * MS
        yield from self._store(blocks, min(num_loaded, len(blocks)))

    def _take(self, load: FakeLoad) -> Job:
        while not load.end:
            for _ in load.steps():
                yield from self._pause()
            if self._happens(self._weather.forget / 4):
                break
            if not load.end:
                yield from self._wait()
        if not self._happens(self._weather.forget):
            load.release()

    def _store(self, blocks: Blocks, first: int) -> Job:
        granted = self.engine.prepare(blocks, first)
        if not granted.lease:
            return
        checksums: list[bytes] = []
        for checksum in self.engine.copy(granted, blocks):
            checksums += [checksum] if checksum else []
            yield from self._pause()
            if self._happens(self._weather.forget / 8):
                break
        if not self._happens(self._weather.forget / 4):
            self.engine.complete(granted, checksums)

    def _pause(self) -> Iterator[int]:
        if self._happens(self._weather.dawdle):
            yield self._draw.randint(20, 800) * MS
        elif self._happens(0.3):
            yield self._draw.randint(0, 3) * MS

    def _wait(self) -> Iterator[int]:
        """Wait for the node; raises DaemonUnavailable if it is gone."""
        yield MS
        if self.engine.stage.is_down:
            raise DaemonUnavailable("the connection broke")

    def _happens(self, chance: float) -> bool:
        return self._draw.random() < chance
