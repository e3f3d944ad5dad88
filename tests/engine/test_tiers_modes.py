"""Told to restore always, or never, while a tier hangs: tokens, time and reasons stay right."""

import signal
import time
from collections.abc import Iterator

import pytest

from kvtier.client import ClientDeadlines
from kvtier.engine.model import LoadedModel
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from tests.engine.attached import AttachedEngine, attached
from tests.engine.models import Reference
from tests.engine.test_tiers_faults import FULL, NUM_BLOCKS, prompt_of
from tests.integration.redis_child import RedisServer
from tests.shim.storage import Call, StorageShim, block

pytestmark = pytest.mark.slow

SEEDS = range(4)
LATE_S = 3.0

DEADLINES = ClientDeadlines(lookup_s=2)
"""As usual, but for a lookup: on a busy machine its quarter of a second may be over."""
"""What a busy machine may add to a tier's deadline of two seconds."""


@pytest.fixture
def disk() -> Iterator[tuple[RunningNode, StorageShim]]:
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        yield RunningNode(directory, environment=shim.environment), shim


class Asked:
    """What became of requests whose blocks the CPU tier has lost."""

    def __init__(self, engine: AttachedEngine, reference: Reference, node: RunningNode) -> None:
        self._engine = engine
        self._reference = reference
        self._node = node

    def fill(self) -> None:
        for seed in SEEDS:
            self._engine.complete(prompt_of(seed), 6)
        self._node.await_idle()
        self._node.drop("cpu")

    def ask(self, seed: int) -> tuple[str, dict[str, int], float]:
        """Return the decision, the blocks missed by what became of them, and the seconds."""
        self._engine.forget()
        start_s = time.monotonic()
        pending = self._engine.submit(prompt_of(seed), 6)
        answer = pending.answer()
        took_s = time.monotonic() - start_s
        assert answer.tokens == tuple(self._reference.generate(prompt_of(seed), 6))
        assert answer.tiers == {"computed": len(prompt_of(seed))}
        missed = self._node.explain(pending.name)["decision"]["missed"]
        return answer.usage.decision, {each["fate"]: each["blocks"] for each in missed}, took_s


def test_always_waits_for_a_hanging_disk_once(
    tiny: LoadedModel, reference: Reference, disk: tuple[RunningNode, StorageShim]
) -> None:
    node, shim = disk
    with (
        node.daemon(ssd__scrub_rate=0),
        attached(tiny, node.socket, deadlines=DEADLINES) as engine,
    ):
        asked = Asked(engine, reference, node)
        asked.fill()
        shim.set({Call.READ: block()})
        decision, missed, took_s = asked.ask(0)
        assert (decision, missed) == ("computed:late", {"deadline": NUM_BLOCKS})
        assert took_s < 2 + LATE_S
        for seed in SEEDS[1:]:
            decision, missed, took_s = asked.ask(seed)
            assert (decision, missed) == ("computed:absent", {"tier_down": NUM_BLOCKS})
            assert took_s < LATE_S
        shim.clear()
        node.await_state("ssd", "up")
        node.await_idle()
        engine.forget()
        node.drop("cpu")
        assert engine.complete(prompt_of(1), 6).tiers["ssd"] == FULL, "it is used again"


@pytest.mark.redis
@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_always_waits_for_a_server_that_is_away_a_moment(
    tiny: LoadedModel, reference: Reference, fault: str
) -> None:
    with work_directory() as directory:
        server = RedisServer(directory)
        settings = {"remote.url": server.url, "ssd.enabled": "false", "remote.min_tokens": 1}
        node = RunningNode(directory, settings)
        with (
            server.start() as redis,
            node.daemon(),
            attached(tiny, node.socket, deadlines=DEADLINES) as engine,
        ):
            asked = Asked(engine, reference, node)
            asked.fill()
            if fault == "killed":
                redis.kill()
            else:
                redis.send(signal.SIGSTOP)
            for seed in SEEDS:
                decision, missed, took_s = asked.ask(seed)
                assert decision in {"computed:failed", "computed:late", "computed:absent"}
                assert set(missed) <= {"tier_down", "deadline", "not_offered"}, missed
                assert took_s < LATE_S


def test_never_asks_no_tier_however_it_does(
    tiny: LoadedModel, reference: Reference, disk: tuple[RunningNode, StorageShim]
) -> None:
    node, shim = disk
    with (
        node.daemon(cost__restore="never", ssd__scrub_rate=0),
        attached(tiny, node.socket, deadlines=DEADLINES) as engine,
    ):
        asked = Asked(engine, reference, node)
        asked.fill()
        before = node.stat()["transfers"]["ssd_to_cpu"]["bytes"]
        shim.set({Call.READ: block()})
        for seed in SEEDS:
            decision, missed, took_s = asked.ask(seed)
            assert (decision, missed) == ("computed:never", {}), "nothing was missed"
            assert took_s < LATE_S
        assert node.stat()["transfers"]["ssd_to_cpu"]["bytes"] == before
        shim.clear()
