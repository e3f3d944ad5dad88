"""A client process of the soak: asks for prompts as people do, until it is told to stop.

Prompts share prefixes: a system prompt and then a document, both as popular as the Zipf law has it.
What does not come back is stored, as by an engine that has computed it. Some loads are given up
after their first block, some stores fail in the middle, and some prompts nobody ever saw.

Each second it writes ``count TIME ASKED CAME AWAY CALLS`` with the blocks it has asked for and got,
the calls without an answer and all calls, since the start. A wrong byte ends it with a trace.
"""

import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kvtier.client import LoadedBlock
from kvtier.errors import DaemonUnavailable
from tests.integration.pattern import PatternEngine
from tests.integration.traffic import DEADLINES, ENDS

NUM_SYSTEM_PROMPTS = 12
NUM_DOCUMENTS = 160
SYSTEM_BLOCKS = 6
DOCUMENT_BLOCKS_MAX = 20
ZIPF = 1.0
UNSEEN = 1 << 24
"""Tokens from here on are in no other prompt."""


class GivenUp(Exception):
    """The customer went away in the middle."""


def popularity(count: int) -> list[float]:
    return [1 / rank**ZIPF for rank in range(1, count + 1)]


class Customer:
    def __init__(self, engine: PatternEngine, seed: int) -> None:
        self._engine = engine
        self._choose = random.Random(seed)
        self._documents = popularity(NUM_DOCUMENTS)
        self._systems = popularity(NUM_SYSTEM_PROMPTS)
        self._unseen = UNSEEN + seed * 100_000
        self.asked = self.came = self.away = self.calls = 0

    def step(self) -> None:
        prompt = self._prompt()
        self.calls += 1
        if self._choose.random() < 0.05:
            self._give_up(prompt)
            return
        tiers, end = self._engine.load(prompt, len(prompt))
        assert end in ENDS, end
        self.asked += len(prompt)
        self.came += len(tiers)
        if len(tiers) < len(prompt):
            self.calls += 1
            self._engine.store(prompt, len(prompt), len(tiers))

    def _prompt(self) -> tuple[int, ...]:
        system = self._choose.choices(range(NUM_SYSTEM_PROMPTS), self._systems)[0]
        document = self._choose.choices(range(NUM_DOCUMENTS), self._documents)[0]
        if self._choose.random() < 0.05:
            self._unseen += 1
            document = self._unseen
        num_blocks = 1 + document % DOCUMENT_BLOCKS_MAX
        return (system,) * SYSTEM_BLOCKS + (NUM_SYSTEM_PROMPTS + document,) * num_blocks

    def _give_up(self, prompt: tuple[int, ...]) -> None:
        """Leave in the middle of a load, or of a store."""

        def leave(_block: LoadedBlock) -> None:
            raise GivenUp

        def fill(_indexes: Sequence[int], _slots: Sequence[memoryview]) -> NoReturn:
            raise GivenUp

        try:
            self._engine.load(prompt, len(prompt), on_block=leave)
            chain = self._engine.chain(prompt, len(prompt))
            self._engine.client.store(self._engine.tenant, chain, 0, fill)
        except GivenUp:
            pass


def main(arguments: Sequence[str]) -> int:
    socket_path, seed = arguments
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    engine = PatternEngine(Path(socket_path), deadlines=DEADLINES)
    customer = Customer(engine, int(seed))
    told_s = 0.0
    with engine:
        while not is_over.is_set():
            try:
                customer.step()
            except DaemonUnavailable:
                customer.away += 1
                is_over.wait(0.05)
            if time.monotonic() - told_s > 1:
                told_s = time.monotonic()
                counts = customer.asked, customer.came, customer.away, customer.calls
                print("count", told_s, *counts, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
