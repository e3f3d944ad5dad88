"""What is to be decided about a request, what is decided, and what came of it."""

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
    "RestorePlan",
    "Source",
    "StepSample",
    "TransferSample",
]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Predicted seconds: about half the time it takes longer than ``mean_s``, seldom ``p95_s``."""

    mean_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class TransferSample:
    """One transfer of a tier, from the moment a worker began with it."""

    num_blocks: int
    num_bytes: int
    depth: int
    """Transfers of that route under way when it began, itself included."""
    seconds: float
    """Without the time it waited in the queue."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step of an engine: a batch of chunks of prompts and of single tokens."""

    num_prefill_tokens: int
    num_decode_tokens: int
    attended: float
    """Sum over the chunks of prompts of new * (past + new / 2), in tokens squared."""
    decode_past_tokens: int
    """Tokens before the new ones, over the sequences that decode."""
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do before a request that comes now."""

    waiting_tokens: int = 0
    """Prompt tokens still to compute, of requests that run or wait."""
    num_running: int = 0
    """Sequences that decode."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """What a model takes, for as long as no step was measured."""

    per_token: float = 0.0
    """Floating-point operations of the layers for one token."""
    per_attended: float = 0.0
    """And for each token it attends to."""
    per_s: float = 0.0
    """What the engine's device does in a second, as it measured; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Source:
    """Consecutive found blocks that one tier would serve."""

    tier: TierName
    num_blocks: int
    queued_bytes: int
    """Of reads that wait or fly on that route before these."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What was found for a request, and what its engine has to do."""

    key_space: bytes
    sources: tuple[Source, ...]
    """In the order of the chain."""
    first_token: int
    """Where the found blocks begin; the tokens before it the engine has itself."""
    num_tokens: int
    """Of the whole prompt; 0: unknown."""
    block_tokens: int
    block_bytes: int
    limit_blocks: int | None
    """The request wants no more; None: it says nothing."""
    load: EngineLoad
    can_split: bool
    """Whether the engine can compute the front while the back is loaded."""
    session: str = ""
    """Of the engine, which is planned for by what it reported itself."""

    @property
    def num_found(self) -> int:
        """Return how many blocks could be restored."""
        return sum(source.num_blocks for source in self.sources)


class PlanReason(StrEnum):
    """Why so much is restored and no more."""

    ALL = "all"
    """Restoring whatever is there ends first."""
    PART = "part"
    """Restoring the rest too would end later."""
    SPLIT = "split"
    """The rest is computed meanwhile."""
    COST = "cost"
    """Recomputing ends first."""
    RISK = "risk"
    """Recomputing ends later on average, but restoring might take far longer."""
    GUARD = "guard"
    """The tier did not pay lately."""
    LIMIT = "limit"
    """The request wants no more."""
    NOTHING = "nothing"
    """No block that it lacks is there."""
    ALWAYS = "always"
    NEVER = "never"
    """By configuration."""


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """How much of what was found to restore: the first ``num_blocks`` of it, 0: nothing."""

    decision: int
    """Its number; outcomes refer to it."""
    num_blocks: int
    reason: PlanReason
    is_split: bool = False
    """Load from the back, and compute from the front meanwhile, until they meet."""
    part_blocks: int = 0
    """A transfer of it carries no more blocks; 0: as many as usual."""
    wait_ns: int = 0
    """How long to wait for it; then what is there is used, and the rest computed."""
    restore: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Of the time until all of ``num_blocks`` are there; of the best restore there was, where
    nothing is restored."""
    recompute: Estimate = field(default_factory=lambda: Estimate(0.0, 0.0))
    """Of the time to compute the same tokens instead, the wait for the engine included."""
    total_s: float = 0.0
    """Predicted time to first token with this plan."""
    recompute_total_s: float = 0.0
    """Predicted time to first token without any restoring."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """What came of a plan, as its engine measured it."""

    decision: int
    tiers: tuple[tuple[TierName, int], ...]
    """Blocks restored, by the tier they came from."""
    restore_s: float
    """From asking for them until the last one that was used was in place."""
    computed_tokens: int
    """Of the prompt."""
    compute_s: float
    """The steps that computed them, as far as they were this request's share."""
    wait_s: float
    """In the engine's queue."""
    ttft_s: float
    """From the request's arrival to its first token."""


@dataclass(frozen=True, slots=True)
class PlanEvaluation:
    """What a decision was worth, as far as one can tell afterwards."""

    saved_s: Mapping[TierName, float]
    """Time to first token that restoring saved against computing, by tier."""
    lost_s: Mapping[TierName, float]
    """What it cost where computing would have been faster."""
    regret_s: float
    """What the other road would have saved; 0: this one was the better."""
    taken: str
    """``restore`` or ``recompute``."""
    cold_s: float | None = None
    """Measured time of computing the same prompt; None if there is only a prediction."""
