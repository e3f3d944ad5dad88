"""What is said over the wire arrives as it was said, and what cannot be said is named."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.limits import GAP_MAX_S, PRIORITY_MAX, SAMPLE_MAX_S
from kvtier.core.plan import EngineLoad, Estimate, PlanOutcome, PlanReason, RestorePlan, StepSample
from kvtier.core.request import NO_TRAITS, RequestTraits
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.v1 import engine_pb2 as pb
from kvtier.wire.convert import (
    load_to_wire,
    outcome_to_wire,
    plan_from_wire,
    plan_to_wire,
    step_to_wire,
    tier_from_wire,
    tier_to_wire,
    tiers_from_wire,
    traits_fault,
    traits_to_wire,
)
from kvtier.wire.incoming import (
    load_from_wire,
    outcomes_from_wire,
    steps_from_wire,
    traits_from_wire,
)

SECONDS = st.floats(0, SAMPLE_MAX_S)
TOKENS = st.integers(0, 2**31 - 1)
WORDS = st.text("abcXYZ019._-", max_size=32)
TRAITS = st.builds(
    RequestTraits,
    request_id=WORDS,
    num_tokens=TOKENS,
    kind=WORDS,
    continues=st.none() | st.floats(0, 1),
    gap_s=st.none() | st.floats(0, GAP_MAX_S),
    priority=st.integers(0, PRIORITY_MAX),
    ttl_s=st.none() | st.floats(0, GAP_MAX_S),
    max_offload_tokens=st.none() | TOKENS,
    max_load_tokens=st.none() | TOKENS,
)
ESTIMATES = st.builds(Estimate, SECONDS, SECONDS)
PLANS = st.builds(
    RestorePlan,
    decision=st.integers(0, 2**64 - 1),
    num_blocks=st.integers(0, 16_384),
    reason=st.sampled_from(PlanReason),
    is_split=st.booleans(),
    wait_ns=st.integers(0, 600_000).map(lambda ms: ms * 10**6),
    restore=ESTIMATES,
    recompute=ESTIMATES,
    total_s=SECONDS,
    recompute_total_s=SECONDS,
)


@given(TRAITS)
def test_traits_arrive(traits: RequestTraits) -> None:
    assert traits_fault(traits) == ""
    sent = pb.Traits.FromString(traits_to_wire(traits).SerializeToString())
    assert traits_from_wire(sent) == traits


def test_what_is_not_said_is_not_known() -> None:
    assert traits_from_wire(pb.Traits()) == NO_TRAITS
    assert traits_to_wire(NO_TRAITS).SerializeToString() == b""
    assert load_from_wire(pb.EngineLoad()) == EngineLoad()


@given(PLANS)
def test_plans_arrive(plan: RestorePlan) -> None:
    sent = pb.Plan.FromString(plan_to_wire(plan).SerializeToString())
    assert plan_from_wire(sent) == plan


@pytest.mark.parametrize(("wait_ns", "told_ms"), [(0, 0), (1, 1), (999_999, 1), (2_900_000, 2)])
def test_a_wait_is_never_longer_than_it_was_nor_none(wait_ns: int, told_ms: int) -> None:
    plan = RestorePlan(1, 1, PlanReason.ALL, wait_ns=wait_ns)
    assert plan_to_wire(plan).wait_ms == told_ms, "0 would mean: as long as you like"


def test_a_plan_of_another_version_is_a_fault() -> None:
    with pytest.raises(ValueError, match="whim"):
        plan_from_wire(pb.Plan(reason="whim"))


@given(
    st.builds(
        PlanOutcome,
        decision=st.integers(0, 2**64 - 1),
        tiers=st.lists(
            st.tuples(st.sampled_from(LOWER_TIERS), st.integers(0, 100)), max_size=8
        ).map(tuple),
        restore_s=SECONDS,
        computed_tokens=st.integers(0, 2**32 - 1),
        compute_s=SECONDS,
        wait_s=SECONDS,
        ttft_s=SECONDS,
    )
)
def test_outcomes_arrive(outcome: PlanOutcome) -> None:
    assert outcomes_from_wire([outcome_to_wire(outcome)]) == (outcome,)


@given(
    st.lists(
        st.builds(
            StepSample,
            num_prefill_tokens=st.integers(0, 2**32 - 1),
            num_decode_tokens=st.integers(0, 2**32 - 1),
            attended=st.floats(),
            decode_past_tokens=st.integers(0, 2**64 - 1),
            seconds=st.floats(),
        ),
        max_size=20,
    )
)
def test_whatever_is_said_of_steps_what_arrives_can_have_been(steps: list[StepSample]) -> None:
    arrived = steps_from_wire([step_to_wire(step) for step in steps])
    for step in arrived:
        assert step in steps
        assert 0 < step.seconds <= SAMPLE_MAX_S
        assert 0 <= step.attended < float("inf")


@given(TOKENS, st.integers(0, 1000))
def test_loads_arrive(waiting: int, running: int) -> None:
    assert load_from_wire(load_to_wire(EngineLoad(waiting, running))) == EngineLoad(
        waiting, running
    )


@given(st.sampled_from([f.name for f in fields(RequestTraits)]), st.floats(allow_nan=True))
def test_no_number_slips_through(name: str, value: float) -> None:
    if name in {"request_id", "kind"}:
        return
    fault = traits_fault(replace(NO_TRAITS, **{name: value}))
    assert fault == "" or fault.startswith(f"traits.{name} is ")
    if value != value or value < 0:
        assert fault


def test_tiers_travel_as_numbers() -> None:
    assert [tier_from_wire(tier_to_wire(tier)) for tier in TierName] == [*TierName]
    assert tiers_from_wire([pb.TIER_CPU, pb.TIER_SSD], [2, 1]) == (
        TierName.CPU,
        TierName.CPU,
        TierName.SSD,
    )
    with pytest.raises(KeyError):
        tier_from_wire(99)
