"""What the requests of one engine came to, as counters since it registered."""

from dataclasses import dataclass

from kvtier.core.plan import PlanEvaluation, PlanOutcome, PlanRequest

__all__ = ["RequestCounters"]


@dataclass(slots=True)
class RequestCounters:
    """Kept by its session; what is asked for per second its reader takes from two looks."""

    requests: int = 0
    """Lookups that were answered; of what the GPU had whole nobody asks."""
    prompt_tokens: int = 0
    gpu_tokens: int = 0
    """Of them, what the engine had itself."""
    found_tokens: int = 0
    restored_tokens: int = 0
    stored_tokens: int = 0
    first_tokens: int = 0
    """Requests of which the engine has told what came of them."""
    first_token_s: float = 0.0
    """Their time to first token, added up."""
    saved_s: float = 0.0
    lost_s: float = 0.0

    def count_lookup(self, ask: PlanRequest) -> None:
        """Count a lookup."""
        self.requests += 1
        self.prompt_tokens += ask.num_tokens
        self.gpu_tokens += ask.first_token
        self.found_tokens += ask.num_found * ask.block_tokens

    def count_outcome(
        self, ask: PlanRequest, outcome: PlanOutcome, evaluation: PlanEvaluation
    ) -> None:
        """Count what came of one."""
        self.first_tokens += 1
        self.first_token_s += outcome.ttft_s
        self.restored_tokens += sum(length for _, length in outcome.tiers) * ask.block_tokens
        self.saved_s += sum(evaluation.saved_s.values())
        self.lost_s += sum(evaluation.lost_s.values())
