"""What an operator is told of a request: for each fate that can be made from outside, the truth."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import pytest

from kvtier.api.rpc.operator_client import local_operator
from kvtier.cli.main import main
from kvtier.client.link import open_link
from kvtier.core.fate import Fate
from kvtier.core.identity import NO_TENANT, tenant_digest
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.daemon.status.explain import FATE_SENTENCES
from kvtier.errors import DaemonUnavailable
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import engine_pb2, engine_pb2_grpc
from kvtier.v1 import operator_pb2 as pb
from tests.integration.pattern import BLOCK_TOKENS, PatternEngine
from tests.shim.storage import Call, StorageShim, block, delay

pytestmark = pytest.mark.slow

SMALL = {"cpu.capacity": "2MiB", "cpu.slab": "256KiB"}
ALICE = tenant_digest("alice")


@dataclass
class Scene:
    """A daemon, an engine, and its disk."""

    node: RunningNode
    engine: PatternEngine
    shim: StorageShim

    def missing(self, prompt: int, num_blocks: int = 4, **more: Any) -> Any:
        """Return what is said of the first block of a prompt that is not served."""
        engine = self.engine
        hashes = engine.chain(prompt, num_blocks)
        told = self.node.explain("", engine.space.digest, hashes, **more)
        return told["chain"]["missing"]

    def fill(self, first: int = 1000, num_prompts: int = 40) -> None:
        """Push everything else out of a small CPU tier."""
        for prompt in range(first, first + num_prompts):
            self.engine.store(prompt, 8)
        self.node.await_idle()


@dataclass
class Case:
    """How a fate comes about: ``make`` returns what is said of it, and where it is said to be."""

    fate: Fate
    make: Callable[[Scene], tuple[Any, int]]
    settings: Mapping[str, str | int] = field(default_factory=dict)


def never_stored(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(1, 2)
    return scene.missing(1, 4), 2


def not_offered(scene: Scene) -> tuple[Any, int]:
    scene.engine.lookup(2, 4)
    return scene.missing(2, 4), 0


def refused_worth(scene: Scene) -> tuple[Any, int]:
    # Chains that come back at once, beside others of which none ever does.
    for prompt in range(6):
        scene.engine.store(prompt, 32)

    one_offs = count(100)

    def refused() -> Any:
        for prompt in range(6):
            scene.engine.load(prompt, 32)
        prompt = next(one_offs)
        scene.engine.store(prompt, 64)
        said = scene.missing(prompt, 64)
        return said if said and said["fate"] == "refused_worth" else None

    said = await_true(refused, "a prompt of a kind that never comes back is refused", 30)
    return said, said["block"]


def refused_depth(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(3, 8, traits=RequestTraits(max_offload_tokens=3 * BLOCK_TOKENS + 1))
    return scene.missing(3, 8), 3


def refused_budget(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(4, 4)
    scene.fill()
    return scene.missing(4, 4), 0


def refused_full(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(5, 200)
    said = scene.missing(5, 200)
    assert 0 < said["block"] < 200
    return said, said["block"]


def evicted(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(6, 4)
    scene.fill()
    return scene.missing(6, 4), 0


def dropped(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(7, 4)
    scene.node.await_idle()
    scene.node.drop("cpu", "ssd")
    return scene.missing(7, 4), 0


def expired(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(8, 4)
    scene.node.await_idle()
    scene.node.drop("cpu")

    def is_over() -> Any:
        scene.engine.load(8, 4)
        scene.node.drop("cpu")
        said = scene.missing(8, 4)
        return said if said and said["fate"] == "expired" else None

    return await_true(is_over, "it has been disconnected"), 0


def failed_check(scene: Scene) -> tuple[Any, int]:
    engine = scene.engine
    link = open_link(scene.node.socket, engine.space, "liar")
    chain = engine_pb2.Chain(tenant=NO_TENANT, hashes=b"".join(engine.chain(9, 4)))
    with grpc.insecure_channel(f"unix:{scene.node.socket}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        prepare = engine_pb2.PrepareStoreRequest(session=link.session, chain=chain)
        granted = stub.PrepareStore(prepare, timeout=20)
        complete = engine_pb2.CompleteStoreRequest(
            session=link.session, lease=granted.lease, checksums=bytes(64)
        )
        stub.CompleteStore(complete, timeout=20)
    engine.load(9, 4)
    scene.node.await_idle()
    link.close()
    return await_true(lambda: scene.missing(9, 4), "it is served no more"), 0


def identity(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(10, 4)
    return scene.missing(10, 4, tenant=ALICE), 0


def salt(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(11, 4)
    with PatternEngine(scene.node.socket, scene.engine.space, ALICE) as alice:
        salted = alice.chain(11, 4)
    unsalted = scene.engine.chain(11, 4)
    told = scene.node.explain(
        "", scene.engine.space.digest, salted, tenant=ALICE, unsalted=unsalted
    )
    without = scene.node.explain("", scene.engine.space.digest, salted, tenant=ALICE)
    assert without["chain"]["missing"]["fate"] == "never_stored", "it cannot know"
    return told["chain"]["missing"], 0


def too_short(scene: Scene) -> tuple[Any, int]:
    return scene.missing(12, 0), 0


def tier_down(scene: Scene) -> tuple[Any, int]:
    scene.engine.store(13, 4)
    scene.node.await_idle()
    scene.node.drop("cpu")
    with scene.shim.suffering({Call.READ: block()}):
        scene.engine.store(14, 4)
        scene.node.drop_now("cpu")
        with suppress(DaemonUnavailable):
            scene.engine.load(14, 4)
        scene.node.await_state("ssd", "out")
        said = scene.missing(13, 4)
    scene.node.await_state("ssd", "up")
    scene.node.await_idle()
    return said, 0


def detached(scene: Scene) -> tuple[Any, int]:
    """Its disk is gone, and so is what was there: the index has forgotten it."""
    scene.engine.store(15, 4)
    scene.node.await_idle()
    scene.node.drop("cpu")
    assert main(["tier", "detach", "ssd", "--connect", str(scene.node.socket)]) == 0
    return scene.missing(15, 4), 0


MISSING = [
    Case(Fate.NEVER_STORED, never_stored),
    Case(Fate.NOT_OFFERED, not_offered),
    Case(
        Fate.REFUSED_WORTH,
        refused_worth,
        SMALL | {"ssd.enabled": "false", "policy.eviction": "rd"},
    ),
    Case(Fate.REFUSED_DEPTH, refused_depth),
    Case(Fate.REFUSED_BUDGET, refused_budget, SMALL | {"ssd.write": "demote", "ssd.gate": "0.0"}),
    Case(Fate.REFUSED_FULL, refused_full, SMALL),
    Case(Fate.EVICTED, evicted, SMALL | {"ssd.enabled": "false"}),
    Case(Fate.DROPPED, dropped),
    Case(Fate.EXPIRED, expired, {"ssd.max_age": "1s"}),
    Case(Fate.FAILED_CHECK, failed_check),
    Case(Fate.IDENTITY, identity),
    Case(Fate.SALT, salt),
    Case(Fate.TOO_SHORT, too_short),
    Case(Fate.TIER_DOWN, tier_down),
    Case(Fate.DETACHED, detached, {"ssd.enabled": "true"}),
]
BY_REQUEST = {Fate.COST, Fate.DEADLINE}
"""What is no block's fate but a request's: see below."""


@pytest.fixture(scope="module")
def common() -> Iterator[Scene]:
    """A daemon as the test kit has it, for the cases that leave it as it was."""
    with scene_of({}) as scene:
        yield scene


@contextmanager
def scene_of(settings: Mapping[str, str | int]) -> Iterator[Scene]:
    """Run a daemon with settings of its own, on a disk that can fail, and an engine."""
    with work_directory() as directory, StorageShim(directory / "ssd", directory) as shim:
        node = RunningNode(directory, dict(settings), shim.environment)
        with node.daemon(), PatternEngine(node.socket) as engine:
            yield Scene(node, engine, shim)


@pytest.mark.parametrize("case", MISSING, ids=lambda case: case.fate.value)
def test_what_became_of_a_block(case: Case, common: Scene) -> None:
    if case.settings:
        with scene_of(case.settings) as scene:
            said, block = case.make(scene)
    else:
        said, block = case.make(common)
    assert said == {
        "block": block,
        "first_token": block * BLOCK_TOKENS,
        "fate": case.fate.value,
        "sentence": FATE_SENTENCES[case.fate],
    }


def test_every_fate_is_made_by_some_test() -> None:
    assert {case.fate for case in MISSING} | BY_REQUEST == set(Fate)


# Decisions


def test_what_was_there_and_computed_sooner_is_told_with_its_numbers() -> None:
    with scene_of({"cost.restore": "auto"}) as scene:
        engine = scene.engine
        engine.store(20, 8)
        steps = [StepSample(4096, 0, 4096.0 * 2048, 0, 0.05)] * 64

        def decided() -> Any:
            engine.client.note_steps(steps, EngineLoad())
            engine.ask(20, 8, RequestTraits(request_id="cheap"), EngineLoad())
            decision = scene.node.explain("cheap")["decision"]
            learned = [*scene.node.stat()["cost"]["engines"].values()]
            is_learned = learned and 40_000 < learned[0]["tokens_per_s"] < 160_000
            return decision if is_learned and decision["reason"] == "cost" else None

        decision = await_true(decided, "an engine so fast restores nothing", 20)
        assert decision["missed"] == [
            {"fate": "cost", "blocks": 8, "sentence": FATE_SENTENCES[Fate.COST]}
        ]
        plan = decision["plan"]
        assert plan["blocks"] == 0
        assert 0 < plan["recompute_s"]["mean"] <= plan["recompute_s"]["p95"]
        assert decision["inputs"]["found"] == [{"tier": "cpu", "blocks": 8}]
        assert decision["model"]["recompute"], "what the model knows of the engine"
        stat = scene.node.stat()
        assert stat["worth"]["decisions"]["cost"] >= 1
        assert stat["worth"]["missed_blocks"]["cost"] >= 8
        (learned,) = stat["cost"]["engines"].values()
        assert learned["samples"] > 0
        await_true(
            lambda: 40_000 < scene.node.metric("kvtier_prefill_tokens_per_second") < 160_000,
            "a gauge says it",
        )


def test_what_did_not_come_in_time_is_told() -> None:
    with scene_of({}) as scene:
        engine, node = scene.engine, scene.node
        engine.store(21, 4)
        node.await_idle()
        node.drop("cpu")
        with scene.shim.suffering({Call.READ: delay(2500)}):
            plan = engine.ask(21, 4, RequestTraits(request_id="late")).plan
            assert plan is not None
            items = list(
                engine.client.load(
                    NO_TENANT, engine.chain(21, 4), 0, decision=plan.decision, timeout_s=2
                )
            )
            assert items == ["late"]
        told = node.explain("late")
        assert told["chain"]["blocks"] == 4, "a request's chain is remembered with it"
        assert told["chain"]["tiers"]["ssd"]["blocks"] == 4
        decision = told["decision"]
        assert decision["missed"] == [
            {"fate": "deadline", "blocks": 4, "sentence": FATE_SENTENCES[Fate.DEADLINE]}
        ]
        node.await_idle(30)


def test_what_came_of_a_decision_is_told_with_its_worth() -> None:
    with scene_of({"cost.restore": "auto"}) as scene:
        engine, node = scene.engine, scene.node
        engine.store(22, 32)
        slow = [StepSample(64, 0, 64.0 * 32, 0, 1.0)] * 64

        def restored() -> Any:
            engine.client.note_steps(slow, EngineLoad())
            plan = engine.ask(22, 32, RequestTraits(request_id="slow"), EngineLoad()).plan
            return plan if plan is not None and plan.num_blocks == 32 else None

        plan = await_true(restored, "an engine so slow restores everything", 20)
        tiers = ((TierName.CPU, 32),)
        engine.client.note_outcome(PlanOutcome(plan.decision, tiers, 0.01, 0, 0.0, 0.0, 0.05))
        decision = await_true(
            lambda: (told := node.explain("slow")["decision"])["judgement"] and told, "it is judged"
        )
        judgement = decision["judgement"]
        assert judgement["taken"] == "restore"
        assert judgement["saved_s"]["cpu"] > 0.5, "128 tokens at a second for 64"
        assert judgement["cold_s"] is None
        worth = node.stat()["worth"]
        assert worth["saved_s"] == pytest.approx(judgement["saved_s"]["cpu"], abs=0.01)
        assert worth["tiers"]["cpu"]["saved_s"] == worth["saved_s"]
        assert worth["lost_s"] == 0


def test_the_runs_of_each_tier_and_what_is_served(common: Scene) -> None:
    engine, node = common.engine, common.node
    engine.store(23, 8)
    node.await_idle()
    chain = node.explain("", engine.space.digest, engine.chain(23, 10))["chain"]
    assert chain["tiers"]["cpu"] == {"blocks": 8, "runs": [[0, 8]], "more_runs": 0}
    assert chain["tiers"]["ssd"] == {"blocks": 8, "runs": [[0, 8]], "more_runs": 0}
    assert chain["tiers"]["remote"] == {"blocks": 0, "runs": [], "more_runs": 0}
    assert chain["served"] == {
        "blocks": 8,
        "tokens": 8 * BLOCK_TOKENS,
        "runs": [{"tier": "cpu", "blocks": 8}],
        "reason": "absent",
    }
    assert chain["missing"]["block"] == 8
    whole = node.explain("", engine.space.digest, engine.chain(23, 8))["chain"]
    assert whole["missing"] is None


def test_explaining_changes_nothing(common: Scene) -> None:
    engine, node = common.engine, common.node
    engine.store(24, 4)
    before = node.await_idle()
    for _ in range(3):
        node.explain("", engine.space.digest, engine.chain(24, 6))
    after = node.stat()
    for key in ("lookup_blocks", "worth", "policy", "tiers"):
        assert after[key] == before[key], key


def test_a_request_that_nobody_knows(common: Scene) -> None:
    assert common.node.explain("never heard of") is None
    chain = common.engine.chain(25, 2)
    told = common.node.explain("never heard of", common.engine.space.digest, chain)
    assert told["decision"] is None
    assert told["chain"]["missing"]["fate"] == "never_stored"


@pytest.mark.parametrize(
    ("request_fields", "named"),
    [
        ({}, "key_space"),
        ({"key_space": b"short"}, "key_space"),
        ({"key_space": bytes(16), "chain": engine_pb2.Chain(hashes=bytes(17))}, "hashes"),
        ({"key_space": bytes(16), "chain": engine_pb2.Chain(tenant=b"me")}, "tenant"),
        ({"key_space": bytes(16), "chain": engine_pb2.Chain(hashes=bytes(16 * 16_385))}, "blocks"),
        ({"key_space": bytes(16), "unsalted": engine_pb2.Chain(hashes=bytes(5))}, "hashes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_question_that_makes_no_sense(
    common: Scene, request_fields: dict[str, Any], named: str
) -> None:
    with local_operator(common.node.socket, 20) as stub:
        calls: list[Callable[[], object]] = [
            lambda: stub.Explain(pb.ExplainRequest(**request_fields), timeout=20)
        ]
        if "unsalted" not in request_fields:
            calls += [
                lambda: stub.Pin(pb.PinRequest(**request_fields), timeout=20),
                lambda: stub.Warm(pb.WarmRequest(**request_fields), timeout=20),
            ]
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert named in caught.value.details()
    assert common.node.stat()["pid"], "it goes on"


def test_a_chain_is_pinned_warmed_and_let_go(common: Scene) -> None:
    engine, node = common.engine, common.node
    engine.store(26, 4)
    node.await_idle()
    space, hashes = engine.space.digest, b"".join(engine.chain(26, 6))
    chain = engine_pb2.Chain(tenant=NO_TENANT, hashes=hashes)
    with local_operator(node.socket, 20) as stub:
        kept = stub.Pin(pb.PinRequest(key_space=space, chain=chain, ttl_s=60), timeout=20)
        assert kept.blocks >= 4
        await_true(lambda: node.stat()["policy"]["retained_bytes"] >= 4 * 8192, "they are kept")
        node.drop("cpu")
        warmed = stub.Warm(pb.WarmRequest(key_space=space, chain=chain), timeout=20)
        assert warmed.ready_blocks + warmed.coming_blocks == 4, warmed
        await_true(lambda: engine.lookup(26, 4)[0] == ["cpu"] * 4, "they are brought up")
        stub.Pin(pb.PinRequest(key_space=space, chain=chain, ttl_s=0), timeout=20)
        assert node.stat()["policy"]["retained_bytes"] == 0
        with pytest.raises(grpc.RpcError, match="ttl_s"):
            stub.Pin(pb.PinRequest(key_space=space, chain=chain, ttl_s=2**32 - 1), timeout=20)


def test_a_tier_is_measured_on_demand(common: Scene) -> None:
    with local_operator(common.node.socket, 20) as stub:
        told = json.loads(stub.Probe(pb.ProbeRequest(), timeout=60).json)
        assert "ssd" in told["tiers"], told
        with pytest.raises(grpc.RpcError, match="unknown tier 99"):
            stub.Probe(pb.ProbeRequest(tiers=[99]), timeout=20)
    route = common.node.stat()["cost"]["routes"]["ssd_to_cpu"]
    assert route["samples"] > 0
    assert route["bytes_per_s"] > 0
