"""Values that the planner takes and returns: requests, measurements, plans and outcomes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvtier.core.residency import TierName

__all__ = [
    "EngineLoad",
    "Estimate",
    "ModelFlops",
    "PlanEvaluation",
    "PlanOutcome",
    "PlanReason",
    "PlanRequest",
    "PlannerSettings",
    "RestorePlan",
    "Source",
    "StepSample",
    "TransferSample",
]


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """What the operator configures."""

    mode: str = "auto"
    """``auto``, ``always`` or ``never``."""
    is_split_allowed: bool = True
    is_guarded: bool = True
    wait_max_ns: int = 5_000_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds: about half of the cases exceed ``mean_s``, few exceed ``p95_s``."""

    mean_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    """The measurement of one transfer, from the moment a worker started it."""

    num_blocks: int
    num_bytes: int
    depth: int
    """Transfers in flight on that route when it started, including itself."""
    seconds: float
    """Duration without the time in the queue."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """The measurement of one engine step: a batch of prefill chunks and decode tokens."""

    num_prefill_tokens: int
    num_decode_tokens: int
    attended: float
    """Sum over the prefill chunks of new * (past + new / 2), in tokens squared."""
    decode_past_tokens: int
    """Sum of the context lengths of the decoding sequences, without the new tokens."""
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The work of an engine ahead of a request that arrives now."""

    waiting_tokens: int = 0
    """Prompt tokens still to compute, of running and waiting requests."""
    num_running: int = 0
    """Number of decoding sequences."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """The model's operations and the device's speed, used until a step is measured."""

    per_token: float = 0.0
    """Floating-point operations of the layers per token."""
    per_attended: float = 0.0
    """Additional operations per token and attended token."""
    per_s: float = 0.0
    """Measured operations per second of the engine's device; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Source:
    """Consecutive found blocks that one tier would serve."""

    tier: TierName
    num_blocks: int
    queued_bytes: int
    """Bytes of reads that are queued or in flight on that route."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was found for a request, and the load of its engine."""

    key_space: bytes
    sources: tuple[Source, ...]
    """Sources of the found blocks, in the order of the chain."""
    first_token: int
    """Position where the found blocks begin; the engine has the tokens before it."""
    num_tokens: int
    """Length of the whole prompt; 0 if unknown."""
    block_tokens: int
    block_bytes: int
    limit_blocks: int | None
    """Maximum number of blocks to restore for the request; None: no limit."""
    load: EngineLoad
    can_split: bool
    """Whether the engine can compute the front while the back is being loaded."""
    session: str = ""
    """The engine's session, whose own measurements are used."""

    @property
    def num_found(self) -> int:
        """Return how many blocks could be restored."""
        return sum(source.num_blocks for source in self.sources)

    @property
    def num_wanted(self) -> int:
        """Return how many of the found blocks the request allows to restore."""
        limit = self.num_found if self.limit_blocks is None else max(self.limit_blocks, 0)
        return min(self.num_found, limit)

    def by_tier(self, num_blocks: int) -> dict[TierName, int]:
        """Return how many of the first ``num_blocks`` found blocks each tier would serve."""
        counts: dict[TierName, int] = {}
        for source in self.sources:
            taken = min(max(source.num_blocks, 0), num_blocks)
            if taken:
                counts[source.tier] = counts.get(source.tier, 0) + taken
            num_blocks -= taken
        return counts

    def tier_at(self, index: int) -> TierName:
        """Return the tier that would serve the found block with this index."""
        for source in self.sources:
            if index < source.num_blocks:
                return source.tier
            index -= source.num_blocks
        raise AssertionError("the index is beyond the found blocks")


class PlanReason(StrEnum):
    """Why a plan restores the number of blocks that it does."""

    ALL = "all"
    """Restoring everything found is fastest."""
    PART = "part"
    """Restoring the rest as well would be slower."""
    SPLIT = "split"
    """The front is computed while the back is restored."""
    COST = "cost"
    """Recomputing is faster."""
    RISK = "risk"
    """Recomputing is slower on average, but restoring might take far longer."""
    GUARD = "guard"
    """The tier's recent restores did not pay off."""
    LIMIT = "limit"
    """The request limits it."""
    NOTHING = "nothing"
    """No missing block was found."""
    ALWAYS = "always"
    NEVER = "never"
    """Disabled by configuration."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A decision to restore the first ``num_blocks`` found blocks; 0: none."""

    decision: int
    """Number of the decision, to which outcomes refer."""
    num_blocks: int
    reason: PlanReason
    is_split: bool = False
    """Load from the back while the engine computes from the front, until both meet."""
    part_blocks: int = 0
    """Maximum number of blocks per transfer; 0: the usual number."""
    wait_ns: int = 0
    """How long the request waits for the restore, before it uses what has arrived and computes the
    rest."""
    restore: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Time until all of ``num_blocks`` are in place; of the best restore found if ``num_blocks`` is
    0."""
    recompute: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Time to compute the same tokens instead, including the wait for the engine."""
    total_s: float = 0.0
    """Predicted time to first token with this plan."""
    recompute_total_s: float = 0.0
    """Predicted time to first token without any restore."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """The outcome of a plan, as its engine measured it."""

    decision: int
    tiers: tuple[tuple[TierName, int], ...]
    """Number of blocks restored from each tier."""
    restore_s: float
    """Time from requesting the blocks until the last one used was in place."""
    computed_tokens: int
    """Number of prompt tokens that were computed."""
    compute_s: float
    """This request's share of the steps that computed them."""
    wait_s: float
    """Time in the engine's queue."""
    ttft_s: float
    """Time to first token, from the request's arrival."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """The estimated gain or loss of a decision, compared with the alternative."""

    saved_s: Mapping[TierName, float]
    """Reduction of the time to first token compared with computing, by tier."""
    lost_s: Mapping[TierName, float]
    """Increase of the time to first token compared with computing, by tier."""
    regret_s: float
    """What the alternative would have saved; 0 if the decision was right."""
    taken: str
    """``restore`` or ``recompute``."""
    cold_s: float | None = None
    """Measured time to compute the same prompt; None if it is only predicted."""
