"""Reads and validates what engines send to the daemon.

Rules
-----
* An invalid field raises ``ValueError`` with its name and range; the service refuses the call.
* Impossible step samples are dropped silently: one among many does not matter.
* A missing field means unknown.
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
    "ended_ids_from_wire",
    "flops_from_wire",
    "layout_from_wire",
    "load_from_wire",
    "outcomes_from_wire",
    "steps_from_wire",
    "tenant_from_wire",
    "traits_from_wire",
]

_TOKENS_MAX = 2**40
"""Limit for the tokens waiting, or attended to, on one engine: far more than a day's work."""

_FLOPS_MAX = 1e24
"""Above any machine, and low enough that sums stay finite."""

_ATTENDED_MAX = 1e18
"""Limit in tokens squared: a million prompts of a million tokens in one step."""


def traits_from_wire(traits: pb.Traits) -> RequestTraits:
    """Return a request's traits."""
    read = RequestTraits(
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
    if fault := traits_fault(read):
        raise ValueError(fault)
    return read


def layout_from_wire(layout: pb.Layout) -> KVLayout:
    """Return an engine's block layout."""
    return KVLayout(
        layout.name,
        layout.version,
        layout.block_tokens,
        layout.block_bytes,
        layout.dtype,
        layout.detail,
    )


def load_from_wire(load: pb.EngineLoad) -> EngineLoad:
    """Return an engine's load."""
    _check("load.waiting_tokens", load.waiting_tokens, _TOKENS_MAX)
    return EngineLoad(load.waiting_tokens, load.running)


def flops_from_wire(flops: pb.ModelFlops) -> ModelFlops:
    """Return a model's FLOPs."""
    for name in ("per_token", "per_attended", "per_s"):
        _check(f"flops.{name}", getattr(flops, name), _FLOPS_MAX)
    return ModelFlops(flops.per_token, flops.per_attended, flops.per_s)


def ended_ids_from_wire(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of finished requests."""
    check_length("over", ids, ENDED_REQUESTS_MAX)
    for place, each in enumerate(ids):
        check_length(f"over[{place}]", each, REQUEST_ID_CHARACTERS_MAX)
    return tuple(ids)


def steps_from_wire(steps: Sequence[pb.Step]) -> tuple[StepSample, ...]:
    """Return the plausible step samples of one report."""
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


def outcomes_from_wire(outcomes: Sequence[pb.Outcome]) -> tuple[PlanOutcome, ...]:
    """Return the outcomes of plans."""
    check_length("outcomes", outcomes, OUTCOMES_MAX)
    return tuple(_outcome_of(f"outcomes[{at}]", each) for at, each in enumerate(outcomes))


def check_length(name: str, what: Sequence[object], most: int) -> None:
    """Raise ValueError, naming the field, if it has more than ``most`` entries."""
    if len(what) > most:
        raise ValueError(f"{name} has {len(what)} entries; {most} is the most")


def tenant_from_wire(chain: pb.Chain) -> bytes:
    """Return a chain's tenant; a chain without one belongs to the tenant without a salt."""
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
    if not 0 <= value <= high:  # rejects NaN, too
        raise ValueError(f"{name} is {value}; it goes from 0 to {high}")
