"""Converts between kvtier's types and protocol messages.

The daemon reads what clients send with ``kvtier.wire.incoming``, which validates it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import cast

from kvtier.core.layout import KVLayout
from kvtier.core.limits import (
    GAP_MAX_S,
    KIND_CHARACTERS_MAX,
    PRIORITY_MAX,
    REQUEST_ID_CHARACTERS_MAX,
)
from kvtier.core.plan import (
    EngineLoad,
    Estimate,
    ModelFlops,
    PlanOutcome,
    PlanReason,
    RestorePlan,
    StepSample,
)
from kvtier.core.request import LoadPurpose, RequestTraits
from kvtier.core.residency_change import ResidencyChange
from kvtier.core.table import as_keys
from kvtier.core.tier_registry import TIERS, TierName
from kvtier.v1 import engine_pb2 as pb

__all__ = [
    "OLDEST_PROTOCOL",
    "PROTOCOL",
    "agreed_protocol",
    "change_from_wire",
    "change_to_wire",
    "flops_to_wire",
    "layout_to_wire",
    "load_to_wire",
    "outcome_to_wire",
    "plan_from_wire",
    "plan_to_wire",
    "purpose_from_wire",
    "purpose_to_wire",
    "step_to_wire",
    "tier_from_wire",
    "tier_to_wire",
    "tiers_from_wire",
    "traits_fault",
    "traits_to_wire",
]

PROTOCOL = 3
"""The newest protocol version that this side speaks. A new field that readers may ignore needs no
new version. A new value, such as a tier or a reason for a plan, does, and is sent only to peers
that agreed on that version."""

OLDEST_PROTOCOL = 3
"""The oldest protocol version that this side speaks, as client and as daemon."""

_TOKENS_MAX = 2**31 - 1
"""More than any model accepts, and within the range of the messages' numbers."""

_WORD = re.compile(r"[A-Za-z0-9._-]+")
_NAMED = re.compile(r"[!-~]+")

_TO_WIRE: Mapping[TierName, "pb.Tier.ValueType"] = {
    name: cast("pb.Tier.ValueType", spec.wire_number) for name, spec in TIERS.items()
}
_FROM_WIRE: Mapping["pb.Tier.ValueType", TierName] = {
    number: name for name, number in _TO_WIRE.items()
}
_PURPOSES: Mapping[LoadPurpose, "pb.LoadRequest.Purpose.ValueType"] = {
    LoadPurpose.COPY: pb.LoadRequest.COPY,
    LoadPurpose.HOLD: pb.LoadRequest.HOLD,
    LoadPurpose.COPY_HELD: pb.LoadRequest.COPY_HELD,
}


def agreed_protocol(newest: int, oldest: int) -> int:
    """Return the newest version that both sides speak; ValueError says which side to upgrade."""
    oldest = min(oldest or newest, newest)
    agreed = min(newest, PROTOCOL)
    if agreed >= max(oldest, OLDEST_PROTOCOL):
        return agreed
    behind = "daemon" if newest > PROTOCOL else "engine"
    raise ValueError(
        f"the engine speaks protocol {_span(oldest, newest)} and the daemon "
        f"{_span(OLDEST_PROTOCOL, PROTOCOL)}; upgrade kvtier in the {behind}"
    )


def _span(oldest: int, newest: int) -> str:
    return str(newest) if oldest == newest else f"{oldest} to {newest}"


def tier_to_wire(tier: TierName) -> "pb.Tier.ValueType":
    """Return the message value of a tier."""
    return _TO_WIRE[tier]


def tier_from_wire(number: "pb.Tier.ValueType") -> TierName:
    """Return the tier of a message value; raises KeyError for an unknown one."""
    return _FROM_WIRE[number]


def purpose_to_wire(purpose: LoadPurpose) -> "pb.LoadRequest.Purpose.ValueType":
    """Return the message value of a load's purpose."""
    return _PURPOSES[purpose]


def purpose_from_wire(number: "pb.LoadRequest.Purpose.ValueType") -> LoadPurpose:
    """Return a load's purpose; an unknown one means promote and copy, as all loads once did."""
    return next((each for each, own in _PURPOSES.items() if own == number), LoadPurpose.COPY)


def tiers_from_wire(
    tiers: Iterable["pb.Tier.ValueType"], lengths: Iterable[int]
) -> tuple[TierName, ...]:
    """Return the tier of each block, from runs of blocks in one tier."""
    each: list[TierName] = []
    for tier, length in zip(tiers, lengths, strict=True):
        each += [tier_from_wire(tier)] * length
    return tuple(each)


def traits_to_wire(traits: RequestTraits) -> pb.Traits:
    """Return a request's traits as a message; unknown ones are left out."""
    return pb.Traits(
        request_id=traits.request_id,
        num_tokens=traits.num_tokens,
        kind=traits.kind,
        continues=traits.continues,
        gap_s=traits.gap_s,
        priority=traits.priority,
        ttl_s=traits.ttl_s,
        max_offload_tokens=traits.max_offload_tokens,
        max_load_tokens=traits.max_load_tokens,
    )


def traits_fault(traits: RequestTraits) -> str:
    """Return which trait is invalid and what is valid, or an empty string.

    Both sides check: the client before it sends, so that one bad request does not affect others in
    the same call, and the daemon for whatever it receives.
    """
    lengths = (
        ("request_id", traits.request_id, REQUEST_ID_CHARACTERS_MAX, _NAMED),
        ("kind", traits.kind, KIND_CHARACTERS_MAX, _WORD),
    )
    for name, text, most, pattern in lengths:
        if len(text) > most:
            return f"traits.{name} has {len(text)} characters; {most} is the most"
        if text and not pattern.fullmatch(text):
            return f"traits.{name} is {text!r}, which has characters that it may not have"
    ranges = (
        ("continues", traits.continues, 1.0),
        ("gap_s", traits.gap_s, GAP_MAX_S),
        ("priority", traits.priority, PRIORITY_MAX),
        ("ttl_s", traits.ttl_s, GAP_MAX_S),
        ("num_tokens", traits.num_tokens, _TOKENS_MAX),
        ("max_offload_tokens", traits.max_offload_tokens, _TOKENS_MAX),
        ("max_load_tokens", traits.max_load_tokens, _TOKENS_MAX),
    )
    for name, value, high in ranges:
        if value is not None and not 0 <= value <= high:  # rejects NaN, too
            return f"traits.{name} is {value}; it goes from 0 to {high}"
    return ""


def layout_to_wire(layout: KVLayout) -> pb.Layout:
    """Return a block layout as a message."""
    return pb.Layout(
        name=layout.name,
        version=layout.version,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        dtype=layout.dtype,
        detail=layout.detail,
    )


def load_to_wire(load: EngineLoad) -> pb.EngineLoad:
    """Return an engine's load as a message."""
    return pb.EngineLoad(waiting_tokens=load.waiting_tokens, running=load.num_running)


def flops_to_wire(flops: ModelFlops) -> pb.ModelFlops:
    """Return a model's FLOPs as a message."""
    return pb.ModelFlops(
        per_token=flops.per_token, per_attended=flops.per_attended, per_s=flops.per_s
    )


def step_to_wire(step: StepSample) -> pb.Step:
    """Return a step's sample as a message."""
    return pb.Step(
        prefill_tokens=step.num_prefill_tokens,
        decode_tokens=step.num_decode_tokens,
        attended=step.attended,
        decode_past_tokens=step.decode_past_tokens,
        seconds=step.seconds,
    )


def outcome_to_wire(outcome: PlanOutcome) -> pb.Outcome:
    """Return a plan's outcome as a message."""
    return pb.Outcome(
        decision=outcome.decision,
        tiers=[tier_to_wire(tier) for tier, _ in outcome.tiers],
        lengths=[num_blocks for _, num_blocks in outcome.tiers],
        restore_s=outcome.restore_s,
        computed_tokens=outcome.computed_tokens,
        compute_s=outcome.compute_s,
        wait_s=outcome.wait_s,
        ttft_s=outcome.ttft_s,
    )


def plan_to_wire(plan: RestorePlan) -> pb.Plan:
    """Return a plan as a message; the wait is rounded down to milliseconds, but never to 0."""
    return pb.Plan(
        decision=plan.decision,
        blocks=plan.num_blocks,
        reason=plan.reason,
        split=plan.is_split,
        wait_ms=max(1, plan.wait_ns // 1_000_000) if plan.wait_ns else 0,
        restore_mean_s=plan.restore.mean_s,
        restore_p95_s=plan.restore.p95_s,
        recompute_mean_s=plan.recompute.mean_s,
        recompute_p95_s=plan.recompute.p95_s,
        total_s=plan.total_s,
        recompute_total_s=plan.recompute_total_s,
    )


def plan_from_wire(plan: pb.Plan) -> RestorePlan:
    """Return a plan; raises ValueError for one of another protocol version."""
    return RestorePlan(
        decision=plan.decision,
        num_blocks=plan.blocks,
        reason=PlanReason(plan.reason),
        is_split=plan.split,
        wait_ns=plan.wait_ms * 1_000_000,
        restore=Estimate(plan.restore_mean_s, plan.restore_p95_s),
        recompute=Estimate(plan.recompute_mean_s, plan.recompute_p95_s),
        total_s=plan.total_s,
        recompute_total_s=plan.recompute_total_s,
    )


def change_to_wire(change: ResidencyChange) -> pb.Change:
    """Convert a change of residency."""
    tier = pb.TIER_UNSPECIFIED if change.tier is None else tier_to_wire(change.tier)
    return pb.Change(tier=tier, there=change.is_there, hashes=change.keys.tobytes())


def change_from_wire(change: pb.Change) -> ResidencyChange:
    """Convert a change of residency."""
    tier = tier_from_wire(change.tier) if change.tier else None
    return ResidencyChange(tier, change.there, as_keys(change.hashes))
