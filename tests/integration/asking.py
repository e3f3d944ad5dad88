"""An engine whose users ask again and again, and which tells the daemon what came of it."""

import random
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier.client import ClientDeadlines, LoadedBlock
from kvtier.core.identity import NO_TENANT
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import DaemonUnavailable
from tests.integration.pattern import PatternEngine

SLOW_STEPS = [StepSample(64, 0, 64.0 * 32, 0, 1.0)] * 16
"""A second for 64 tokens: anything is restored sooner, and much is saved by it."""

_DEADLINES = ClientDeadlines(2, 2, 2, 0.1)
_PAUSE_S = 0.02


class Users:
    """Ask for prompts drawn at random, from entering the context until it is left."""

    def __init__(self, socket: Path, seed: int = 1, *, name: str = "busy-engine") -> None:
        print(f"users seed {seed}")
        self._choose = random.Random(seed)
        self._engine = PatternEngine(socket, deadlines=_DEADLINES, name=name)
        self._is_over = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.num_asked = 0

    def ask(self, prompt: int, num_blocks: int) -> None:
        """Make one request: look up, load what is planned, tell what came of it, store the rest."""
        self.num_asked += 1
        traits = RequestTraits(request_id=f"cmpl-{self.num_asked:08x}-0")
        client, chain = self._engine.client, self._engine.chain(prompt, num_blocks)
        plan = self._engine.ask(prompt, num_blocks, traits, EngineLoad(0, 1)).plan
        assert plan is not None
        tiers: list[TierName] = []
        if plan.num_blocks:
            loading = client.load(NO_TENANT, chain[: plan.num_blocks], 0, decision=plan.decision)
            tiers = [item.tier for item in loading if isinstance(item, LoadedBlock)]
        runs = tuple((tier, 1) for tier in tiers)
        outcome = PlanOutcome(plan.decision, runs, 0.004, 4, 0.01, 0.0, 0.02)
        client.note_steps(SLOW_STEPS, EngineLoad(128, 3))
        client.note_outcome(outcome)
        self._engine.store(prompt, num_blocks, len(tiers), traits=traits)

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_PAUSE_S):
                prompt = self._choose.randrange(200)
                try:
                    self.ask(prompt, 2 + prompt % 14)
                except DaemonUnavailable:
                    continue
        except BaseException as fault:
            self._fault = fault

    def __enter__(self) -> Self:
        self._engine.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "a request did not end"
        self._engine.__exit__(kind, error, trace)
        if error is None and self._fault is not None:
            raise self._fault
