"""The log of recent decisions about requests, and their outcomes.

``explain`` reads it. An engine usually reports the outcome of a decision within seconds. Outcomes
that come late, twice, or for another engine's decision are ignored.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from kvtier.core.cost.evaluation import took_s
from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES, NO_TENANT
from kvtier.core.limits import (
    COLD_TIMES_MAX,
    DECISIONS_BYTES_MAX,
    DECISIONS_MAX,
    OUTCOME_LATE_NS,
)
from kvtier.core.plan import PlanOutcome, RestorePlan
from kvtier.core.planner import PlanEvaluation, PlanRequest
from kvtier.core.residency import TierName

__all__ = ["DecisionLog", "LoggedDecision"]


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    """One lookup and its answer."""

    number: int
    request_id: str
    session: str
    engine: str
    at_ns: int
    """Time by the node's clock, which has no meaning elsewhere."""
    ask: PlanRequest
    plan: RestorePlan
    found: tuple[tuple[TierName, int], ...] = ()
    """The runs that were found, as sent to the engine."""
    reason: str = ""
    """Why the runs end where they do."""
    missed: Mapping[Fate, int] = field(default_factory=dict)
    """Number of blocks that are not restored, by fate."""
    outcome: PlanOutcome | None = None
    evaluation: PlanEvaluation | None = None
    tenant: bytes = NO_TENANT
    hashes: bytes = b""
    """Joined hashes of the request's chain, from the root on."""

    @property
    def is_cold(self) -> bool:
        """Return whether the whole prompt was computed."""
        return (
            self.outcome is not None
            and not self.outcome.tiers
            and not self.ask.first_token
            and self.outcome.computed_tokens >= self.ask.num_tokens
        )


class DecisionLog:
    """The last ``DECISIONS_MAX`` decisions, or fewer if their chains are long."""

    def __init__(self, first_number: int = 1) -> None:
        self._next_number = first_number
        self._by_number: dict[int, LoggedDecision] = {}
        """Decisions, oldest first."""
        self._by_request: dict[str, int] = {}
        """Number of the last decision about each request that has an id."""
        self._num_bytes = 0
        """Total size of the chains."""
        self._cold_s: dict[bytes, float] = {}
        """Shortest measured time of computing a prompt, by its last full block, oldest first."""

    def __len__(self) -> int:
        return len(self._by_number)

    def next_number(self) -> int:
        """Return a new number for the next decision."""
        self._next_number += 1
        return self._next_number - 1

    def add(self, decision: LoggedDecision) -> None:
        """Add a decision; the oldest ones are removed to make room."""
        self._by_number[decision.number] = decision
        self._num_bytes += len(decision.hashes)
        if decision.request_id:
            self._by_request[decision.request_id] = decision.number
        while len(self._by_number) > DECISIONS_MAX or self._num_bytes > DECISIONS_BYTES_MAX:
            oldest = self._by_number.pop(next(iter(self._by_number)))
            self._num_bytes -= len(oldest.hashes)
            if self._by_request.get(oldest.request_id) == oldest.number:
                del self._by_request[oldest.request_id]

    def find(self, number: int) -> LoggedDecision | None:
        """Return a decision by its number, if it is remembered."""
        return self._by_number.get(number)

    def latest(self, count: int) -> list[LoggedDecision]:
        """Return the last decisions, newest first."""
        return list(islice(reversed(self._by_number.values()), count))

    def find_request(self, request_id: str) -> LoggedDecision | None:
        """Return the last decision about a request, if it is remembered.

        An engine's name for a request may be longer than the id in its answer: vLLM appends a dash,
        the prompt's number and random letters.
        """
        number = self._by_request.get(request_id, 0) or max(
            (last for name, last in self._by_request.items() if name.startswith(f"{request_id}-")),
            default=0,
        )
        return self._by_number.get(number)

    def add_missed(self, number: int, fate: Fate, num_blocks: int) -> None:
        """Record that blocks expected by a decision did not arrive."""
        decision = self._by_number.get(number)
        if decision is not None:
            missed = {**decision.missed, fate: decision.missed.get(fate, 0) + num_blocks}
            self._by_number[number] = replace(decision, missed=missed)

    def open(self, number: int, session: str, now_ns: int) -> LoggedDecision | None:
        """Return a decision whose outcome this session may still report."""
        decision = self._by_number.get(number)
        if decision is None or decision.session != session or decision.outcome is not None:
            return None
        return decision if now_ns - decision.at_ns <= OUTCOME_LATE_NS else None

    def close(self, number: int, outcome: PlanOutcome, evaluation: PlanEvaluation) -> None:
        """Record the outcome of an open decision."""
        decision = replace(self._by_number[number], outcome=outcome, evaluation=evaluation)
        self._by_number[number] = decision
        last = decision.hashes[-HASH_BYTES:]
        if last and decision.is_cold:
            self._cold_s[last] = min(took_s(outcome), self._cold_s.pop(last, math.inf))
            if len(self._cold_s) > COLD_TIMES_MAX:
                del self._cold_s[next(iter(self._cold_s))]

    def cold_s(self, decision: LoggedDecision) -> float | None:
        """Return the measured time of computing this prompt, or one with the same full blocks."""
        return self._cold_s.get(decision.hashes[-HASH_BYTES:])
