"""An engine that is stepped by hand, with every invariant checked after each step."""

import random
from dataclasses import dataclass, field
from typing import Any

from kvtier.engine.engine import Engine, create_pool
from kvtier.engine.model import LoadedModel
from kvtier.engine.port import KVPort, NoPort
from kvtier.engine.request import EngineRequest, Output, Usage
from kvtier.engine.settings import EngineSettings
from kvtier.testing.memory_port import MemoryPort
from tests.engine.models import VOCAB

STEPS_MAX = 2000


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    chance = random.Random(seed)
    return tuple(chance.randrange(3, VOCAB) for _ in range(length))


@dataclass
class Answer:
    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def is_done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish is not None

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def usage(self) -> Usage:
        usage = self.outputs[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == usage.tier_tokens.total() + usage.computed_tokens
        return usage


class Drive:
    def __init__(self, loaded: LoadedModel, port: KVPort | None = None, **settings: Any) -> None:
        chosen = EngineSettings(**({"pool_tokens": 4096, "is_poisoned": True} | settings))
        pool = create_pool(loaded, chosen)
        self.port = port or NoPort(chosen.block_tokens)
        if isinstance(self.port, MemoryPort):
            self.port.pool = pool
        self.engine = Engine(loaded, chosen, self.port, pool=pool)
        self.now_ns = 0
        self._count = 0

    def submit(self, tokens: tuple[int, ...], max_tokens: int = 8, **fields: Any) -> Answer:
        self._count += 1
        request = EngineRequest(f"request-{self._count}", tokens, max_tokens, **fields)
        return self.submit_request(request)

    def submit_request(self, request: EngineRequest) -> Answer:
        answer = Answer()
        self.engine.submit(request, answer.outputs.append, self.now_ns)
        return answer

    def step(self) -> bool:
        moved = self.engine.step(self.now_ns)
        self.engine.check()
        return moved

    def run(self) -> None:
        for _ in range(STEPS_MAX):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError(f"not idle after {STEPS_MAX} steps: {self.engine.snapshot()}")

    def settle(self) -> None:
        """Step until nothing moves: all that is left waits for the port."""
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise AssertionError("it never settles")

    def ask(self, tokens: tuple[int, ...], max_tokens: int = 8, **fields: Any) -> Answer:
        answer = self.submit(tokens, max_tokens, **fields)
        self.run()
        assert answer.is_done
        return answer
