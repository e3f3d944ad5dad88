"""An engine in this process, attached to a daemon in another one."""

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.integrated import DaemonPort
from kvtier.core.residency import TierName
from kvtier.engine.engine import Engine, block_layout, create_pool
from kvtier.engine.model import LoadedModel, key_space, model_flops
from kvtier.engine.port import NoPort
from kvtier.engine.request import EngineRequest, Output, Usage
from kvtier.engine.runner import EngineRunner
from kvtier.engine.settings import EngineSettings
from kvtier.testing.child import await_true

BLOCK_TOKENS = 64
SETTINGS = EngineSettings(pool_tokens=2048, block_tokens=BLOCK_TOKENS, is_poisoned=True)
ANSWER_TIMEOUT_S = 60
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    usage: Usage

    @property
    def tiers(self) -> dict[str, int]:
        """Return the prompt tokens of every tier that served some, and those computed."""
        served = self.usage.tier_tokens
        counts = {tier.value: served[tier] for tier in TierName}
        counts["computed"] = self.usage.computed_tokens
        assert sum(counts.values()) == self.usage.prompt_tokens
        return {name: count for name, count in counts.items() if count}


@dataclass
class Pending:
    name: str
    tokens: list[int] = field(default_factory=list)
    last: Output | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def deliver(self, output: Output) -> None:
        self.tokens += output.token_ids
        self.has_begun.set()
        if output.finish is not None:
            self.last = output
            self.has_ended.set()

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        assert self.has_ended.wait(timeout_s), "the request did not end"
        assert self.last is not None
        assert self.last.usage is not None, self.last
        assert not self.last.error, self.last.error
        return Answer(tuple(self.tokens), self.last.usage)


class AttachedEngine:
    """What ``kvtier engine`` makes, without its HTTP server."""

    def __init__(self, loaded: LoadedModel, client: Client | None, runner: EngineRunner) -> None:
        self.loaded = loaded
        self.client = client
        self.runner = runner

    def submit(self, prompt: tuple[int, ...], num_tokens: int = 8, **more: Any) -> Pending:
        pending = Pending(f"request-{next(NUMBERS)}")
        self.runner.submit(EngineRequest(pending.name, prompt, num_tokens, **more), pending.deliver)
        return pending

    def complete(self, prompt: tuple[int, ...], num_tokens: int = 8, **more: Any) -> Answer:
        """Return the answer, once what it made is stored too."""
        answer = self.submit(prompt, num_tokens, **more).answer()
        self.settle()
        return answer

    def settle(self) -> None:
        """Wait until nothing is on its way between this engine and its daemon."""
        await_true(
            lambda: self.runner.call(lambda engine: engine.is_idle), "it is idle", ANSWER_TIMEOUT_S
        )

    def forget(self) -> int:
        """Empty the GPU tier; returns the blocks it lost."""
        return self.runner.call(lambda engine: engine.drop_cache()).num_blocks

    def num_used(self) -> int:
        """Return the blocks of the pool that requests hold."""
        return self.runner.call(lambda engine: engine.snapshot()).pool_blocks.used


@contextmanager
def attached(
    loaded: LoadedModel,
    socket_path: Path | None,
    settings: EngineSettings = SETTINGS,
    deadlines: ClientDeadlines | None = None,
    make_port: type[DaemonPort] = DaemonPort,
) -> Iterator[AttachedEngine]:
    """Run an engine; without a socket it is alone."""
    pool = create_pool(loaded, settings)
    client = None
    if socket_path is None:
        port: NoPort | DaemonPort = NoPort(settings.block_tokens)
    else:
        client = Client(
            socket_path,
            key_space(loaded, block_layout(loaded, settings)),
            "test",
            deadlines=deadlines or ClientDeadlines(5, 10, 10, 0.1),
            flops=model_flops(loaded),
            can_split=True,
        )
        port = make_port(
            client,
            pool,
            block_tokens=settings.block_tokens,
            engine_block_bytes=pool.shape.block_bytes,
        )
    runner = EngineRunner(Engine(loaded, settings, port, pool=pool))
    runner.start()
    try:
        if client:
            client.start()
            assert client.wait_attached(30)
        yield AttachedEngine(loaded, client, runner)
    finally:
        assert runner.stop(), "the engine stopped in time"
