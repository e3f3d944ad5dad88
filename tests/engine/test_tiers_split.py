"""Loads from the back by a real daemon, whatever becomes of them: the tokens stay the same."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvtier.client import ClientDeadlines
from kvtier.connectors.integrated import DaemonPort
from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks
from kvtier.core.plan import PlanReason, RestorePlan
from kvtier.engine.model import LoadedModel
from kvtier.engine.port import LoadProgress, PortEvent, PortLookup
from kvtier.engine.settings import EngineSettings
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.engine.attached import BLOCK_TOKENS, Answer, AttachedEngine, attached
from tests.engine.models import Reference
from tests.engine.test_tiers_faults import PAGE, flip, prompt_of
from tests.shim.storage import Call, StorageShim, block

pytestmark = pytest.mark.slow

NUM_BLOCKS = 6
SETTINGS = EngineSettings(pool_tokens=2048, block_tokens=BLOCK_TOKENS, is_poisoned=True)


class SplittingPort(DaemonPort):
    """Splits whatever is found: whether that pays is another's question."""

    def poll(self) -> list[PortEvent]:
        return [self._split(event) for event in super().poll()]

    def _split(self, event: PortEvent) -> PortEvent:
        if not isinstance(event, PortLookup) or not event.tiers:
            return event
        decision = event.plan.decision if event.plan is not None else 0
        plan = RestorePlan(decision, len(event.tiers), PlanReason.SPLIT, is_split=True)
        return replace(event, plan=plan)


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


class Splitting:
    """An engine that splits, and whose answers are those of the model."""

    def __init__(self, engine: AttachedEngine, reference: Reference) -> None:
        self._engine = engine
        self._reference = reference

    def complete(self, seed: int) -> Answer:
        self._engine.forget()
        answer = self._engine.complete(prompt_of(seed), 6)
        assert answer.tokens == tuple(self._reference.generate(prompt_of(seed), 6))
        return answer


@pytest.fixture
def splitting(tiny: LoadedModel, reference: Reference, node: RunningNode) -> Iterator[Splitting]:
    with (
        node.daemon(),
        attached(tiny, node.socket, SETTINGS, make_port=SplittingPort) as engine,
    ):
        yield Splitting(engine, reference)


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
def test_from_either_tier(splitting: Splitting, node: RunningNode, tier: str) -> None:
    for seed in range(3):
        splitting.complete(seed)
    for seed in range(3):
        node.await_idle()
        if tier == "ssd":
            node.drop("cpu")
        answer = splitting.complete(seed)
        assert set(answer.tiers) <= {tier, "computed"}
        assert answer.usage.decision in {"loaded", "loaded_part:split", "computed:split"}
    assert node.await_idle()["pins"] == 0


@pytest.mark.parametrize("position", [0, 3, 5])
def test_a_block_that_rots_ends_the_load_and_not_the_request(
    splitting: Splitting, node: RunningNode, position: int
) -> None:
    splitting.complete(1)
    node.await_idle()
    flip(node.directory / "ssd", position, PAGE + 5000)
    node.drop("cpu")
    hurt = splitting.complete(1)
    num_behind = NUM_BLOCKS - 1 - position
    assert hurt.tiers.get("ssd", 0) <= num_behind * BLOCK_TOKENS, "nothing before it is loaded"
    node.await_idle()
    assert splitting.complete(1).tiers.get("computed", 0) >= 9
    assert node.await_idle()["pins"] == 0


def test_a_daemon_that_goes_away_leaves_the_rest_to_computing(
    tiny: LoadedModel, reference: Reference, node: RunningNode
) -> None:
    with (
        node.daemon() as daemon,
        attached(tiny, node.socket, SETTINGS, make_port=SplittingPort) as engine,
    ):
        splitting = Splitting(engine, reference)
        splitting.complete(2)
        node.await_idle()
        daemon.kill()
        splitting.complete(2)
        with node.daemon():
            assert engine.client is not None
            assert engine.client.wait_attached(30)
            splitting.complete(2)


def striking(strike: Callable[[], None]) -> type[DaemonPort]:
    """Return a port that strikes once, when a load from the back has brought a block."""
    strikes = [strike]

    class Striking(SplittingPort):
        def _emit(self, event: PortEvent) -> None:
            super()._emit(event)
            if isinstance(event, LoadProgress) and strikes:
                strikes.pop()()

        def claim(self, request_id: str, num_computed: int) -> int:
            """Let nothing be computed before that."""
            await_true(lambda: not strikes, "a block has come from the back")
            return super().claim(request_id, num_computed)

    return Striking


def bring_back(engine: AttachedEngine, seed: int, first: int) -> None:
    """Have the blocks from ``first`` on in the CPU tier."""
    space = engine.runner.call(lambda each: each.key_space)
    hashes = hash_blocks(chain_root(space.digest, NO_TENANT), prompt_of(seed), BLOCK_TOKENS)
    assert engine.client is not None
    assert list(engine.client.load(NO_TENANT, hashes, first))[-1] == "complete"


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_daemon_that_goes_away_in_the_middle(
    tiny: LoadedModel, reference: Reference, node: RunningNode, fault: str
) -> None:
    """The last blocks have come, the first ones hang in the disk, and then nothing comes at all."""
    shim = StorageShim(node.directory / "ssd", node.directory)
    node.environment = shim.environment
    with shim, ExitStack() as stack:
        daemon = stack.enter_context(node.daemon(ssd__scrub_rate=0))
        standstill = ExitStack()
        stack.enter_context(standstill)

        def strike() -> None:
            if fault == "killed":
                daemon.kill()
            else:
                standstill.enter_context(daemon.stopped())

        engine = stack.enter_context(
            attached(
                tiny,
                node.socket,
                SETTINGS,
                ClientDeadlines(5, 10, 10, 0.1),
                make_port=striking(strike),
            )
        )
        prompt = prompt_of(2)
        right = tuple(reference.generate(prompt, 6))
        assert engine.complete(prompt, 6).tokens == right
        engine.forget()
        node.await_idle()
        node.drop("cpu")
        bring_back(engine, 2, NUM_BLOCKS - 2)
        shim.set({Call.READ: block()})
        start_s = time.monotonic()
        answer = engine.submit(prompt, 6).answer()
        took_s = time.monotonic() - start_s
        print(f"{fault}: {took_s:.2f} s, {answer.tiers}, {answer.usage.decision}")
        assert answer.tokens == right
        assert took_s < 5, "nobody waited for the load's ten seconds"
        shim.clear()
        standstill.close()
        if fault == "killed":
            stack.enter_context(node.daemon())
        assert engine.client is not None
        await_true(lambda: engine.client.is_attached, "the daemon is used again")
        engine.settle()
        engine.forget()
        assert engine.complete(prompt, 6).tokens == right
        status = node.await_idle(20)
        assert (status["pins"], status["leases"]) == (0, 0)
