"""What is decided shows from outside: in tokens that stay the same, and in what explain says.

Each speed here is so extreme that no machine, however busy, could decide otherwise.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.config import load_config
from kvtier.core.plan import EngineLoad, PlanOutcome, RestorePlan, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.engine.model import LoadedModel
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.throttle_tier import ThrottleTier
from kvtier.tiers.breaker import BreakerTier
from kvtier.tiers.memory import MemoryTier
from tests.engine.attached import AttachedEngine, attached
from tests.engine.models import Reference, load_tiny
from tests.integration.in_process import running
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

NUM_BLOCKS = 8
DECIDED_S = 60.0

SLOW_ENGINE = [StepSample(64, 0, 64.0 * 32, 0, 1.0)] * 64
"""A second for 64 tokens: anything is restored sooner."""

FAST_ENGINE = [StepSample(4096, 0, 4096.0 * 2048, 0, 0.002)] * 64
"""So fast that a call to the daemon takes longer."""


@dataclass
class Node:
    """A daemon in this process, whose SSD tier is as slow as it is told to be."""

    served: RunningNode
    tier: ThrottleTier

    def decision(self, name: str) -> Any:
        """Return what explain says of a request."""
        return self.served.explain(name)["decision"]


@contextmanager
def node_of(**settings: str) -> Iterator[Node]:
    """Run it with blocks written at once, and restored as is decided unless settings say how."""
    changes = {"cost.restore": "auto", "ssd.deadline": "60s"}
    changes |= {name.replace("__", "."): value for name, value in settings.items()}
    with work_directory() as directory:
        served = RunningNode(directory, changes)
        served.directory.joinpath("ssd").mkdir()
        config = load_config(None, {key: str(value) for key, value in served.settings.items()}, {})
        tier = ThrottleTier(MemoryTier(64 << 20))
        with running(config, lambda: BreakerTier(tier)):
            yield Node(served, tier)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """A model that computes much for each byte of its KV."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_tiny(
        tmp_path_factory.mktemp("slow") / "llama",
        hidden_size=384,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=6,
        initializer_range=0.05,
    )
    torch.set_num_threads(num_threads)


class Asker:
    """An engine that is asked for one prompt again and again, and finds it on SSD alone."""

    def __init__(self, node: Node, engine: AttachedEngine, prompt: Sequence[int]) -> None:
        self._node = node
        self._engine = engine
        self._prompt = tuple(prompt)
        self._tokens = engine.complete(self._prompt).tokens
        self._node.served.await_idle()
        self.tokens_expected = Reference(engine.loaded).generate(self._prompt, 8)

    def ask(self) -> tuple[str, dict[str, int], Any]:
        """Return what was decided, which tier served how much, and what explain says."""
        self._node.served.drop("cpu")
        self._engine.forget()
        pending = self._engine.submit(self._prompt)
        answer = pending.answer()
        self._engine.settle()
        assert list(answer.tokens) == self.tokens_expected, "no decision changes a token"
        return answer.usage.decision, answer.tiers, self._node.decision(pending.name)

    def await_decision(self, decision: str, reason: str) -> tuple[dict[str, int], Any]:
        """Ask until that is decided; returns which tier served how much, and the explanation."""

        def look() -> Any:
            decided, tiers, told = self.ask()
            return (tiers, told) if (decided, told["reason"]) == (decision, reason) else None

        found: tuple[dict[str, int], Any] = await_true(look, f"it is {decision}", DECIDED_S)
        return found


def test_a_tier_throttled_to_nothing_is_left_alone_until_it_is_released(
    slow_model: LoadedModel,
) -> None:
    prompt = [3 + number % 250 for number in range(64 * NUM_BLOCKS + 20)]
    with (
        node_of(cost__guard="false", cost__split="false") as node,
        attached(slow_model, node.served.socket) as engine,
    ):
        asker = Asker(node, engine, prompt)
        node.tier.set(0, latency_s=3.0)
        tiers, told = asker.await_decision("computed:cost", "cost")
        assert tiers == {"computed": len(prompt)}
        assert told["plan"]["blocks"] == 0
        assert told["plan"]["restore_s"]["mean"] > 1.0, "the best restore there was"
        assert told["plan"]["restore_s"]["mean"] > told["plan"]["recompute_s"]["mean"]
        assert told["missed"][0]["fate"] == "cost"
        assert told["inputs"]["found"] == [{"tier": "ssd", "blocks": NUM_BLOCKS}]
        node.tier.set(0)
        tiers, told = asker.await_decision("loaded", "all")
        assert tiers == {"ssd": 64 * NUM_BLOCKS, "computed": 20}
        assert told["plan"]["first_token_s"] < told["plan"]["first_token_by_recompute_s"]
        assert told["model"]["restore"]["ssd_read"]["num_noted"] > 1


def test_a_tier_that_slows_down_costs_a_few_requests_and_comes_back(
    slow_model: LoadedModel,
) -> None:
    """As it is by default: models, guard and split together, whichever of them finds it out."""
    prompt = [3 + number % 250 for number in range(64 * NUM_BLOCKS + 20)]
    with node_of() as node, attached(slow_model, node.served.socket) as engine:
        asker = Asker(node, engine, prompt)
        asker.await_decision("loaded", "all")
        node.tier.set(0, latency_s=3.0)
        num_waited = num_alone = 0
        while num_alone < 3:
            _, _, told = asker.ask()
            is_alone = told["reason"] in {"cost", "risk", "guard"}
            num_alone = num_alone + 1 if is_alone else 0
            num_waited += not is_alone
            assert num_waited <= 12, told
        print(f"{num_waited} requests waited")
        node.tier.set(0)
        await_true(lambda: asker.ask()[1].get("ssd"), "it is used again", DECIDED_S)


@pytest.mark.parametrize(
    ("mode", "latency_s", "decided", "served"),
    [
        ("always", 0.3, "loaded", {"ssd": 64 * NUM_BLOCKS, "computed": 20}),
        ("never", 0.0, "computed:never", {"computed": 64 * NUM_BLOCKS + 20}),
    ],
)
def test_the_operator_decides(
    mode: str,
    latency_s: float,
    decided: str,
    served: dict[str, int],
    tmp_path: Path,
) -> None:
    """A tier slow as death under ``always``, a fast one under ``never``."""
    loaded = load_tiny(tmp_path / "tiny")
    prompt = [3 + number % 250 for number in range(64 * NUM_BLOCKS + 20)]
    with node_of(cost__restore=mode) as node, attached(loaded, node.served.socket) as engine:
        asker = Asker(node, engine, prompt)
        node.tier.set(0, latency_s=latency_s)
        for _ in range(2):
            decision, tiers, told = asker.ask()
            assert (decision, tiers) == (decided, served)
            assert told["reason"] == mode
            assert told["plan"]["blocks"] == (NUM_BLOCKS if mode == "always" else 0)


# Engines that say what they like of their speed


class Teller:
    """A client that reports steps and outcomes as a test wants them."""

    def __init__(self, node: Node, engine: PatternEngine, steps: list[StepSample]) -> None:
        self._node = node
        self._engine = engine
        self._num_asked = 0
        self._engine.store(1, 32)
        self._engine.client.note_steps(steps, EngineLoad())
        await_true(self._is_learned, "the steps are known")

    def _is_learned(self) -> bool:
        engines = self._node.served.stat()["cost"]["engines"]
        return any(each["samples"] > 0 for each in engines.values())

    def ask(self, load: EngineLoad | None = None) -> tuple[RestorePlan, Any]:
        """Return a new decision about the same prompt, as the client and as explain has it."""
        self._num_asked += 1
        name = f"request-{self._num_asked}"
        plan = self._engine.ask(1, 32, RequestTraits(request_id=name), load).plan
        assert plan is not None
        told = self._node.decision(name)
        assert told["reason"] == plan.reason
        assert told["plan"]["blocks"] == plan.num_blocks
        return plan, told

    def conclude(self, plan: RestorePlan, ttft_s: float) -> None:
        """Say that all came, and how long the request took."""
        tiers = ((TierName.CPU, plan.num_blocks),)
        outcome = PlanOutcome(plan.decision, tiers, min(ttft_s, 0.01), 0, 0.0, 0.0, ttft_s)
        self._engine.client.note_outcome(outcome)

    def await_reason(self, reason: str, load: EngineLoad | None = None) -> tuple[RestorePlan, Any]:
        """Ask until it is decided for that reason."""

        def look() -> Any:
            plan, told = self.ask(load)
            return (plan, told) if plan.reason == reason else None

        found: tuple[RestorePlan, Any] = await_true(look, f"the reason is {reason}", DECIDED_S)
        return found

    def guarded(self) -> list[str]:
        """Return the tiers that the guard leaves alone."""
        _, told = self.ask()
        closed: list[str] = told["model"]["guarded"]
        return closed


@contextmanager
def telling(node: Node, steps: list[StepSample]) -> Iterator[Teller]:
    with PatternEngine(node.served.socket) as engine:
        yield Teller(node, engine, steps)


def test_a_saturated_engine_restores_where_an_idle_one_computes() -> None:
    with node_of() as node, telling(node, FAST_ENGINE) as teller:
        plan, told = teller.await_reason("cost", EngineLoad())
        assert plan.num_blocks == 0
        assert told["inputs"]["waiting_tokens"] == 0
        busy = EngineLoad(waiting_tokens=50_000_000, num_running=0)
        plan, told = teller.await_reason("all", busy)
        assert plan.num_blocks == 32, "while it waits, restoring is free"
        assert told["inputs"]["waiting_tokens"] == 50_000_000
        assert told["plan"]["recompute_s"]["mean"] > 1.0
        plan, _ = teller.await_reason("cost", EngineLoad())
        assert plan.num_blocks == 0, "and an idle one computes again"


def test_the_guard_closes_a_tier_that_does_not_pay_and_opens_it_again() -> None:
    with node_of() as node, telling(node, SLOW_ENGINE) as teller:

        def lose() -> Any:
            plan, told = teller.ask()
            if plan.reason == "all":
                teller.conclude(plan, 500.0)  # where computing would have taken two seconds
            return (plan, told) if plan.reason == "guard" else None

        plan, told = await_true(lose, "the tier is left alone", DECIDED_S)
        assert plan.num_blocks == 0
        assert told["model"]["guarded"] == ["cpu"]
        guarded = partial(node.served.metric, "kvtier_tier_guarded")
        await_true(lambda: guarded(tier="cpu") == guarded() == 1, "the gauge says it")
        assert node.served.stat()["worth"]["lost_s"] > 0
        plan, _ = teller.await_reason("all")  # the trial, some seconds later
        assert teller.guarded() == ["cpu"], "only one at a time tries it"
        teller.conclude(plan, 0.01)
        await_true(lambda: not teller.guarded(), "it pays again", DECIDED_S)
        plan, told = teller.await_reason("all")
        assert plan.num_blocks == 32
        assert node.served.stat()["worth"]["saved_s"] > 0
