"""What engines say, as the node takes it: anything that makes no sense is refused by its name.

Rules
-----
* ``ValueError`` names the field and says what it may be; the service turns it into a refusal.
* A step that cannot be is left out without a word: measurements are many, and one more or less
  changes nothing. Everything else was said on purpose, and is refused.
* A client that leaves a field out is served as if it had said nothing.
"""

from collections.abc import Sequence

from kvtier.core.identity import NO_TENANT
from kvtier.core.layout import KVLayout
from kvtier.core.limits import (
    CHAIN_BLOCKS_MAX,
    ENDED_REQUESTS_MAX,
    OUTCOME_RUNS_MAX,
    OUTCOMES_MAX,
    REQUEST_ID_CHARACTERS_MAX,
    SAMPLE_MAX_S,
    STEPS_MAX,
)
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits
from kvtier.core.residency import TierName
from kvtier.v1 import engine_pb2 as pb
from kvtier.wire.convert import tier_from_wire, traits_fault

__all__ = [
    "check_length",
    "flops_of",
    "layout_of",
    "load_of",
    "outcomes_of",
    "over_of",
    "steps_of",
    "tenant_of",
    "traits_of",
]

_TOKENS_MAX = 2**40
"""Tokens that wait, or were attended to, on one engine: far above what a day computes."""

_FLOPS_MAX = 1e24
"""Above any machine, and far below where sums of it would no longer be numbers."""

_ATTENDED_MAX = 1e18
"""In tokens squared: a million prompts of a million tokens in one step."""


def traits_of(traits: pb.Traits) -> RequestTraits:
    """Return what is said of a request."""
    said = RequestTraits(
        request_id=traits.request_id,
        num_tokens=traits.num_tokens,
        kind=traits.kind,
        continues=traits.continues if traits.HasField("continues") else None,
        gap_s=traits.gap_s if traits.HasField("gap_s") else None,
        priority=traits.priority,
        ttl_s=traits.ttl_s if traits.HasField("ttl_s") else None,
        max_offload_tokens=(
            traits.max_offload_tokens if traits.HasField("max_offload_tokens") else None
        ),
        max_load_tokens=traits.max_load_tokens if traits.HasField("max_load_tokens") else None,
    )
    if fault := traits_fault(said):
        raise ValueError(fault)
    return said


def layout_of(layout: pb.Layout) -> KVLayout:
    """Return how an engine arranges its blocks."""
    return KVLayout(
        layout.name,
        layout.version,
        layout.block_tokens,
        layout.block_bytes,
        layout.dtype,
        layout.detail,
    )


def load_of(load: pb.EngineLoad) -> EngineLoad:
    """Return what an engine has to do."""
    _check("load.waiting_tokens", load.waiting_tokens, _TOKENS_MAX)
    return EngineLoad(load.waiting_tokens, load.running)


def flops_of(flops: pb.ModelFlops) -> ModelFlops:
    """Return what a model takes."""
    for name in ("per_token", "per_attended", "per_s"):
        _check(f"flops.{name}", getattr(flops, name), _FLOPS_MAX)
    return ModelFlops(flops.per_token, flops.per_attended, flops.per_s)


def over_of(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of requests that are over."""
    check_length("over", ids, ENDED_REQUESTS_MAX)
    for place, each in enumerate(ids):
        check_length(f"over[{place}]", each, REQUEST_ID_CHARACTERS_MAX)
    return tuple(ids)


def steps_of(steps: Sequence[pb.Step]) -> tuple[StepSample, ...]:
    """Return the steps of one report that can have been."""
    check_length("steps", steps, STEPS_MAX)
    return tuple(
        StepSample(
            each.prefill_tokens,
            each.decode_tokens,
            each.attended,
            each.decode_past_tokens,
            each.seconds,
        )
        for each in steps
        if 0 < each.seconds <= SAMPLE_MAX_S
        and 0 <= each.attended <= _ATTENDED_MAX
        and each.decode_past_tokens <= _TOKENS_MAX
    )


def outcomes_of(outcomes: Sequence[pb.Outcome]) -> tuple[PlanOutcome, ...]:
    """Return what came of plans."""
    check_length("outcomes", outcomes, OUTCOMES_MAX)
    return tuple(_outcome_of(f"outcomes[{at}]", each) for at, each in enumerate(outcomes))


def check_length(name: str, what: Sequence[object], most: int) -> None:
    """Raise ValueError, which names the field, if it has more than ``most`` entries."""
    if len(what) > most:
        raise ValueError(f"{name} has {len(what)} entries; {most} is the most")


def tenant_of(chain: pb.Chain) -> bytes:
    """Return a chain's tenant; an operator who leaves it out means that of no salt."""
    return chain.tenant or NO_TENANT


def _outcome_of(name: str, outcome: pb.Outcome) -> PlanOutcome:
    for part in ("restore_s", "compute_s", "wait_s", "ttft_s"):
        _check(f"{name}.{part}", getattr(outcome, part), SAMPLE_MAX_S)
    return PlanOutcome(
        decision=outcome.decision,
        tiers=_runs_of(name, outcome),
        restore_s=outcome.restore_s,
        computed_tokens=outcome.computed_tokens,
        compute_s=outcome.compute_s,
        wait_s=outcome.wait_s,
        ttft_s=outcome.ttft_s,
    )


def _runs_of(name: str, outcome: pb.Outcome) -> tuple[tuple[TierName, int], ...]:
    check_length(f"{name}.tiers", outcome.tiers, OUTCOME_RUNS_MAX)
    if len(outcome.tiers) != len(outcome.lengths):
        raise ValueError(f"{name}.lengths has not one number for each of {name}.tiers")
    _check(f"{name}.lengths, summed up,", sum(outcome.lengths), CHAIN_BLOCKS_MAX)
    try:
        tiers = [tier_from_wire(number) for number in outcome.tiers]
    except KeyError as unknown:
        raise ValueError(f"{name}.tiers has {unknown}, which is no tier") from None
    return tuple(zip(tiers, outcome.lengths, strict=True))


def _check(name: str, value: float, high: float) -> None:
    if not 0 <= value <= high:  # which NaN is not either
        raise ValueError(f"{name} is {value}; it goes from 0 to {high}")
