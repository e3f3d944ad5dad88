"""Requests that go on while a test does harm: every byte is checked, and every call is timed."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvtier.client import ClientDeadlines
from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import await_true
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine

DEADLINES = ClientDeadlines(lookup_s=1, load_s=2, store_s=2, reconnect_s=0.1)

LATE_S = 5.0
"""How much later than its deadline a call may end: what a busy machine takes to run a thread."""

ENDS = frozenset({"complete", "absent", "failed", "no_room", "late", "corrupt", "daemon_away"})


class Traffic:
    """Engines that store and load prompts at random, from entering the context until it is left.

    Fails, when it is left, for a wrong byte, an unknown answer or a call that ended too late.
    """

    def __init__(
        self, node: RunningNode, seed: int, num_engines: int = 3, num_prompts: int = 80
    ) -> None:
        print(f"traffic seed {seed}")
        self._node = node
        self._num_prompts = num_prompts
        self._seeds = [seed + number for number in range(num_engines)]
        self._is_over = threading.Event()
        self._faults: list[BaseException] = []
        self._threads: Sequence[threading.Thread] = ()
        self._engines = ExitStack()
        self.loaded: Counter[str] = Counter()
        """Blocks that came, by tier."""
        self.ended: Counter[str] = Counter()
        """Loads by how they ended, ``away`` for any call without an answer."""
        self.longest_s = 0.0

    def await_loaded(self, tier: str, timeout_s: float = 30.0) -> None:
        """Wait until more blocks have come from a tier than have now."""
        before = self.loaded[tier]

        def look() -> bool:
            self._raise_fault()
            return self.loaded[tier] > before

        await_true(look, f"blocks come from {tier}", timeout_s)

    def _run(self, engine: PatternEngine, seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not self._is_over.is_set():
                start_s = time.monotonic()
                try:
                    self._step(engine, choose)
                except DaemonUnavailable:
                    self.ended["away"] += 1
                    self._is_over.wait(0.05)
                took_s = time.monotonic() - start_s
                self.longest_s = max(self.longest_s, took_s)
                assert took_s < engine.deadlines.load_s + LATE_S, f"a call took {took_s:.1f} s"
        except BaseException as fault:
            self._faults.append(fault)

    def _step(self, engine: PatternEngine, choose: random.Random) -> None:
        prompt = choose.randrange(self._num_prompts)
        num_blocks = 4 + prompt % 13
        if choose.random() < 0.3:
            engine.store(prompt, num_blocks)
            return
        tiers, end = engine.load(prompt, num_blocks)
        assert end in ENDS, end
        self.loaded.update(tiers)
        self.ended[end] += 1

    def _raise_fault(self) -> None:
        if self._faults:
            raise self._faults[0]

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            engines = [
                stack.enter_context(PatternEngine(self._node.socket, deadlines=DEADLINES))
                for _ in self._seeds
            ]
            self._engines = stack.pop_all()
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(engines, self._seeds, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(DEADLINES.load_s + LATE_S)
        is_stuck = any(thread.is_alive() for thread in self._threads)
        if not is_stuck:
            self._engines.close()
        print(
            f"loaded {dict(self.loaded)}, ended {dict(self.ended)}, {self.longest_s:.2f} s a call"
        )
        if error is None:
            self._raise_fault()
            assert not is_stuck, "a call did not end"
