"""What an external engine says besides its blocks: announcements, plans followed, measurements."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest

from kvtier.client import Announcement, LoadedBlock
from kvtier.client.link import open_link
from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import (
    ANNOUNCED_MAX,
    CHAIN_BLOCKS_MAX,
    ENDED_REQUESTS_MAX,
    GAP_MAX_S,
    OUTCOMES_MAX,
    PRIORITY_MAX,
    SAMPLE_MAX_S,
    STEPS_MAX,
)
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.errors import CallRefused, RegistrationRefused
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from tests.integration.pattern import BLOCK_TOKENS, PatternEngine, key_space

pytestmark = pytest.mark.slow

CHAIN = pb.Chain(tenant=NO_TENANT, hashes=bytes(range(32)))


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    """One daemon for all of them; each uses prompts of its own."""
    with work_directory() as directory:
        served = RunningNode(directory, {"cpu.capacity": "32MiB"})
        with served.daemon():
            yield served


@contextmanager
def raw(node: RunningNode) -> Iterator[engine_pb2_grpc.EngineStub]:
    with grpc.insecure_channel(f"unix:{node.socket}") as channel:
        yield engine_pb2_grpc.EngineStub(channel)


# A request's life


def test_an_engine_announces_follows_its_plan_and_tells_what_came_of_it(node: RunningNode) -> None:
    traits = RequestTraits(
        request_id="life-1", num_tokens=30, kind="chat", continues=0.9, gap_s=60.0
    )
    with PatternEngine(node.socket) as engine:
        engine.store(100, 6, traits=replace(traits, request_id="life-0"), num_prompt_blocks=4)
        before = node.metric("kvtier_announced_requests_total")
        engine.announce(100, 7, traits)
        await_true(
            lambda: node.metric("kvtier_announced_requests_total") == before + 1, "it is announced"
        )
        found = engine.ask(100, 7, traits, EngineLoad(1000, 2))
        plan = found.plan
        assert plan is not None
        assert (found.tiers, plan.num_blocks) == ((TierName.CPU,) * 6, 6)
        assert plan.reason == "always", "as the test kit configures it"
        chain = engine.chain(100, plan.num_blocks)
        loaded = list(
            engine.client.load(
                NO_TENANT, chain, 0, decision=plan.decision, timeout_s=plan.wait_ns / 1e9 or None
            )
        )
        assert [each.index for each in loaded[:-1] if isinstance(each, LoadedBlock)] == [*range(6)]
        assert loaded[-1] == "complete"
        tiers = ((TierName.CPU, 6),)
        engine.client.note_steps([StepSample(6, 0, 168.0, 0, 0.01)], EngineLoad(0, 1))
        engine.client.note_outcome(PlanOutcome(plan.decision, tiers, 0.004, 6, 0.01, 0.0, 0.015))
        engine.client.announce([], ["life-1"])
        told = await_true(lambda: node.explain("life-1")["decision"]["outcome"], "it is told")
        assert told == {
            "restored": [{"tier": "cpu", "blocks": 6}],
            "restore_s": 0.004,
            "computed_tokens": 6,
            "compute_s": 0.01,
            "wait_s": 0.0,
            "first_token_s": 0.015,
        }
        inputs = node.explain("life-1")["decision"]["inputs"]
        assert (inputs["waiting_tokens"], inputs["running"]) == (1000, 2)
        assert inputs["prompt_tokens"] == 30


def test_blocks_come_from_the_back_where_that_is_asked_for(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(101, 8)
        payloads = engine.payloads(101, 8)
        chain = engine.chain(101, 8)
        indexes = []
        for item in engine.client.load(NO_TENANT, chain, 2, from_back=True):
            if isinstance(item, LoadedBlock):
                assert item.payload == payloads[item.index]
                indexes.append(item.index)
        assert item == "complete"
        assert indexes == [7, 6, 5, 4, 3, 2]


def test_a_load_from_the_back_of_what_is_not_all_there(node: RunningNode) -> None:
    """Which block a slot holds is told, not guessed: a wrong guess would condemn good blocks."""
    with PatternEngine(node.socket) as engine:
        engine.store(102, 5)
        payloads = engine.payloads(102, 8)
        items = list(engine.client.load(NO_TENANT, engine.chain(102, 8), 0, from_back=True))
        for item in items[:-1]:
            assert isinstance(item, LoadedBlock)
        assert items[-1] != "corrupt"
        assert engine.load(102, 5) == (["cpu"] * 5, "complete"), "none was condemned"
        assert len(payloads) == 8


def test_ending_a_load_from_the_back_early_lets_go_of_the_front(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(103, 8)
        blocks = engine.client.load(NO_TENANT, engine.chain(103, 8), 0, from_back=True)
        first = next(blocks)
        assert isinstance(first, LoadedBlock)
        assert first.index == 7
        blocks.close()
        assert node.await_idle()["pins"] == 0


# What makes no sense is refused by name


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_id": "x" * 129}, "traits.request_id"),
        ({"request_id": "two words"}, "traits.request_id"),
        ({"kind": "x" * 33}, "traits.kind"),
        ({"kind": "<script>"}, "traits.kind"),
        ({"continues": float("nan")}, "traits.continues"),
        ({"continues": -0.1}, "traits.continues"),
        ({"continues": 1.5}, "traits.continues"),
        ({"gap_s": float("inf")}, "traits.gap_s"),
        ({"gap_s": -1.0}, "traits.gap_s"),
        ({"ttl_s": GAP_MAX_S + 1.0}, "traits.ttl_s"),
        ({"priority": PRIORITY_MAX + 1}, "traits.priority"),
        ({"num_tokens": 2**32 - 1}, "traits.num_tokens"),
        ({"max_offload_tokens": 2**31}, "traits.max_offload_tokens"),
        ({"max_load_tokens": 2**31}, "traits.max_load_tokens"),
    ],
    ids=str,
)
def test_traits_that_make_no_sense(
    node: RunningNode, fields: dict[str, object], named: str
) -> None:
    traits = pb.Traits(**fields)  # type: ignore[arg-type]  # one field of whatever type
    with PatternEngine(node.socket) as engine, raw(node) as stub:
        session = engine.client.session
        calls: dict[str, Callable[[], object]] = {
            "lookup": lambda: stub.Lookup(
                pb.LookupRequest(session=session, chain=CHAIN, traits=traits), timeout=20
            ),
            "store": lambda: stub.PrepareStore(
                pb.PrepareStoreRequest(session=session, chain=CHAIN, traits=traits), timeout=20
            ),
            "announce": lambda: stub.Announce(
                pb.AnnounceRequest(
                    session=session, requests=[pb.Announced(traits=traits, chain=CHAIN)]
                ),
                timeout=20,
            ),
        }
        for name, call in calls.items():
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert named in caught.value.details()
        said = RequestTraits(**fields)  # type: ignore[arg-type]  # fields of any type
        with pytest.raises(CallRefused, match=named):
            engine.ask(104, traits=said)
        with pytest.raises(CallRefused, match=named):
            engine.store(104, traits=said)
        engine.announce(104, traits=said)
        assert engine.lookup(104) == ([], "absent"), "others go on, in the same session"
        assert engine.client.session == session


def outcome(**changes: object) -> pb.Outcome:
    fields = {"tiers": [pb.TIER_CPU], "lengths": [1], "ttft_s": 0.1} | changes
    return pb.Outcome(**fields)  # type: ignore[arg-type]  # fields of any type


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"outcomes": [outcome(ttft_s=float("nan"))]}, "outcomes[0].ttft_s"),
        ({"outcomes": [outcome(), outcome(wait_s=-1.0)]}, "outcomes[1].wait_s"),
        ({"outcomes": [outcome(restore_s=SAMPLE_MAX_S * 2.0)]}, "outcomes[0].restore_s"),
        ({"outcomes": [outcome(tiers=[0])]}, "outcomes[0].tiers"),
        ({"outcomes": [outcome(tiers=[99])]}, "outcomes[0].tiers"),
        ({"outcomes": [outcome(lengths=[1, 2])]}, "outcomes[0].lengths"),
        ({"outcomes": [outcome(lengths=[CHAIN_BLOCKS_MAX + 1])]}, "outcomes[0].lengths"),
        ({"outcomes": [outcome(tiers=[1] * 65, lengths=[1] * 65)]}, "outcomes[0].tiers"),
        ({"outcomes": [outcome()] * (OUTCOMES_MAX + 1)}, "outcomes has"),
        ({"steps": [pb.Step(seconds=1.0)] * (STEPS_MAX + 1)}, "steps has"),
        ({"load": pb.EngineLoad(waiting_tokens=2**63)}, "load.waiting_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_report_that_makes_no_sense(
    node: RunningNode, fields: dict[str, object], named: str
) -> None:
    with PatternEngine(node.socket) as engine, raw(node) as stub:
        request = pb.ReportRequest(session=engine.client.session, **fields)  # type: ignore[arg-type]  # fields of any type
        with pytest.raises(grpc.RpcError) as caught:
            stub.Report(request, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in caught.value.details()


@pytest.mark.parametrize(
    ("step", "label"),
    [
        (pb.Step(prefill_tokens=1, seconds=float("nan")), "nan"),
        (pb.Step(prefill_tokens=1, seconds=float("inf")), "inf"),
        (pb.Step(prefill_tokens=1, seconds=-1.0), "negative"),
        (pb.Step(prefill_tokens=1, seconds=0.0), "no time at all"),
        (pb.Step(prefill_tokens=1, seconds=1.0, attended=float("inf")), "attended"),
        (pb.Step(prefill_tokens=1, seconds=1.0, attended=-1.0), "attended to less than nothing"),
        (pb.Step(seconds=1.0, decode_past_tokens=2**63), "too long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_step_that_cannot_be_is_left_out(node: RunningNode, step: pb.Step, label: str) -> None:
    with PatternEngine(node.socket) as engine, raw(node) as stub:
        before = node.stat()["cost"]["engines"]
        stub.Report(pb.ReportRequest(session=engine.client.session, steps=[step]), timeout=20)
        assert node.stat()["cost"]["engines"] == before, label


def test_lists_that_are_too_long(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine, raw(node) as stub:
        session = engine.client.session
        for request in (
            pb.AnnounceRequest(session=session, requests=[pb.Announced()] * (ANNOUNCED_MAX + 1)),
            pb.AnnounceRequest(session=session, over=["x"] * (ENDED_REQUESTS_MAX + 1)),
            pb.AnnounceRequest(session=session, over=["x" * 129]),
            pb.AnnounceRequest(session=session, requests=[pb.Announced(chain=pb.Chain())]),
            pb.AnnounceRequest(session=session, requests=[pb.Announced(chain=CHAIN, first=3)]),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Announce(request, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            stub.Announce(pb.AnnounceRequest(session="nobody"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("field", ["per_token", "per_attended", "per_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e30])
def test_a_model_that_takes_what_cannot_be(node: RunningNode, field: str, value: float) -> None:
    flops = replace(ModelFlops(), **{field: value})
    with pytest.raises(RegistrationRefused, match=f"flops.{field}"):
        open_link(node.socket, key_space(), "absurd", flops=flops)


def test_a_client_that_says_nothing_new_is_served_as_before(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine, raw(node) as stub:
        engine.store(105)
        chain = pb.Chain(tenant=NO_TENANT, hashes=b"".join(engine.chain(105, 4)))
        session = engine.client.session
        found = stub.Lookup(
            pb.LookupRequest(session=session, chain=chain, deadline_ms=1000), timeout=20
        )
        assert (list(found.lengths), found.reason) == ([4], "complete")
        granted = stub.PrepareStore(
            pb.PrepareStoreRequest(session=session, chain=chain), timeout=20
        )
        assert granted.present_blocks == 4
        replies = stub.Load(
            pb.LoadRequest(session=session, chain=chain, deadline_ms=1000), timeout=20
        )
        offsets = [offset for reply in replies for offset in reply.offsets]
        assert len(offsets) == 4
        stub.Report(pb.ReportRequest(session=session, used_bytes=1), timeout=20)
    node.await_idle(60)


def test_an_outcome_of_a_decision_that_was_not_made_for_this_engine(node: RunningNode) -> None:
    with PatternEngine(node.socket) as one, PatternEngine(node.socket) as other:
        one.store(106)
        plan = one.ask(106, traits=RequestTraits(request_id="foreign")).plan
        assert plan is not None
        lie = PlanOutcome(plan.decision, ((TierName.CPU, 4),), 9.0, 0, 9.0, 9.0, 9.0)
        other.client.note_outcome(lie)
        other.client.note_outcome(replace(lie, decision=2**63))
        truth = replace(lie, restore_s=0.1, compute_s=0.0, wait_s=0.0, ttft_s=0.1)
        await_true(lambda: len(node.stat()["engines"]) == 2, "those of earlier tests have gone")
        other.client.announce([], ["nobody"])
        one.client.note_outcome(truth)
        told = await_true(lambda: node.explain("foreign")["decision"]["outcome"], "it is told")
        assert told["restore_s"] == 0.1


@pytest.mark.parametrize(
    ("traits", "load"),
    [
        (RequestTraits(num_tokens=2**31 - 1), EngineLoad()),
        (RequestTraits(num_tokens=16), EngineLoad(waiting_tokens=2**40, num_running=2**32 - 1)),
    ],
    ids=["a prompt without end", "an engine without rest"],
)
def test_no_lie_saves_more_than_computing_what_was_restored(
    node: RunningNode, traits: RequestTraits, load: EngineLoad
) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(107)
        before = node.stat()["worth"]
        plan = engine.ask(107, traits=replace(traits, request_id="boast"), load=load).plan
        assert plan is not None
        at_once = PlanOutcome(plan.decision, ((TierName.CPU, 4),), 0.0, 0, 0.0, 0.0, 0.0)
        engine.client.note_outcome(at_once)
        await_true(lambda: node.explain("boast")["decision"]["outcome"], "it is told")
        saved_s = node.stat()["worth"]["saved_s"] - before["saved_s"]
        assert 0 <= saved_s < 60, "sixteen tokens were not computed"


def test_nothing_is_lost_for_longer_than_an_outcome_is_waited_for(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.store(108)
        before = node.stat()["worth"]
        plan = engine.ask(108, traits=RequestTraits(request_id="moan")).plan
        assert plan is not None
        lie = PlanOutcome(plan.decision, ((TierName.CPU, 4),), 9.0, 0, 9.0, 0.0, 86_400.0)
        engine.client.note_outcome(lie)
        engine.client.note_outcome(replace(lie, ttft_s=1.0))
        told = await_true(lambda: node.explain("moan")["decision"]["outcome"], "it is told")
        assert told["first_token_s"] == 1.0, "what cannot be is not taken in"
        assert node.stat()["worth"]["lost_s"] - before["lost_s"] <= 1.0


# Nobody waits for what is said


def test_saying_things_to_a_daemon_that_stands_still_costs_nothing() -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon() as daemon, PatternEngine(node.socket) as engine:
            with daemon.stopped():
                start_s = time.monotonic()
                chain = engine.chain(1, 64)
                for number in range(10_000):
                    traits = RequestTraits(request_id=str(number))
                    engine.client.announce(
                        [Announcement(traits, NO_TENANT, chain, 0)], [str(number)]
                    )
                    engine.client.note_steps([StepSample(1, 1, 1.0, 1, 0.01)], EngineLoad(1, 1))
                    engine.client.note_outcome(PlanOutcome(number, (), 0.0, 1, 0.1, 0.0, 0.1))
                took_s = time.monotonic() - start_s
                print(f"30,000 words in {took_s:.2f} s")
                assert took_s < 30, "not even a millisecond a call is waited"
            assert engine.store(2) == 4 or engine.client.wait_attached(30)
            before = node.metric("kvtier_announced_requests_total")
            engine.announce(3, traits=RequestTraits(request_id="after"))
            await_true(
                lambda: node.metric("kvtier_announced_requests_total") > before,
                "it is heard again",
            )


def test_a_thousand_announcements_cost_few_calls(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        before = node.metric("kvtier_announced_requests_total")
        calls = node.metric("kvtier_policy_seconds_count")
        many = [
            Announcement(
                RequestTraits(request_id=f"many-{number}"), NO_TENANT, engine.chain(number, 1), 0
            )
            for number in range(900)
        ]
        for each in many:
            engine.client.announce([each])
        await_true(
            lambda: node.metric("kvtier_announced_requests_total") == before + 900, "all are told"
        )
        num_calls = node.metric("kvtier_policy_seconds_count") - calls
        print(f"{num_calls:.0f} calls")
        assert num_calls < 300
        assert BLOCK_TOKENS
