"""What is told of the last requests, and what each engine's requests came to."""

import json
from dataclasses import asdict, replace

from kvtier.core.plan import (
    EngineLoad,
    PlanEvaluation,
    PlanOutcome,
    PlanReason,
    PlanRequest,
    RestorePlan,
    Source,
)
from kvtier.core.residency import TierName
from kvtier.daemon.status.document import recent_requests
from kvtier.node.state.decision_log import DecisionLog, LoggedDecision
from kvtier.node.state.session import RequestCounters

CPU, SSD = TierName.CPU, TierName.SSD
FOUND = ((CPU, 2), (SSD, 3), (CPU, 1))
SOURCES = tuple(Source(tier, length, 0) for tier, length in FOUND)
ASK = PlanRequest(bytes(16), SOURCES, 128, 640, 64, 3000, None, EngineLoad(), can_split=False)
PLAN = RestorePlan(7, 6, PlanReason.ALL, total_s=0.25, recompute_total_s=1.25)
OUTCOME = PlanOutcome(7, ((CPU, 2), (SSD, 2)), 0.1, 256, 0.1, 0.05, 0.5)
WORTH = PlanEvaluation({CPU: 1.0}, {SSD: 0.25}, 0.125, "restore")
DECISION = LoggedDecision(7, "cmpl-7", "token", "engine", 5_000_000_000, ASK, PLAN, FOUND)


def told(decision: LoggedDecision) -> dict[str, object]:
    decision_log = DecisionLog()
    decision_log.add(decision)
    (request,) = recent_requests(decision_log, 7_500_000_000)
    return json.loads(json.dumps(request))


def test_a_request_is_told_before_its_engine_has_said_what_came_of_it() -> None:
    assert told(DECISION) == {
        "decision": 7,
        "request_id": "cmpl-7",
        "engine": "engine",
        "age_s": 2.5,
        "prompt_tokens": 640,
        "gpu_tokens": 128,
        "found_tokens": {"cpu": 192, "ssd": 192, "remote": 0},
        "planned_tokens": 384,
        "reason": "all",
        "predicted_s": 0.25,
        "recompute_s": 1.25,
        "restored_tokens": None,
        "first_token_s": None,
        "saved_s": None,
        "regret_s": None,
        "cold_s": None,
    }


def test_what_came_of_it_is_told_with_what_it_cost() -> None:
    request = told(replace(DECISION, outcome=OUTCOME, evaluation=WORTH))
    assert request["restored_tokens"] == {"cpu": 128, "ssd": 128, "remote": 0}
    worth = ("first_token_s", "saved_s", "regret_s")
    assert [request[name] for name in worth] == [0.5, 0.75, 0.125]


def test_where_nothing_was_found_nothing_was_predicted() -> None:
    nothing = replace(DECISION, plan=RestorePlan(7, 0, PlanReason.NOTHING), found=())
    request = told(nothing)
    assert request["predicted_s"] is request["recompute_s"] is None
    assert request["found_tokens"] == {"cpu": 0, "ssd": 0, "remote": 0}


def test_the_last_ones_come_first_and_no_more_than_are_looked_at() -> None:
    decision_log = DecisionLog()
    for number in range(1, 101):
        decision_log.add(replace(DECISION, number=number))
    assert [each["decision"] for each in recent_requests(decision_log, 0)] == [*range(100, 68, -1)]


def test_an_engines_requests_add_up() -> None:
    counters = RequestCounters()
    for _ in range(2):
        counters.count_lookup(ASK)
    counters.count_outcome(ASK, OUTCOME, WORTH)
    assert asdict(counters) == {
        "requests": 2,
        "prompt_tokens": 1280,
        "gpu_tokens": 256,
        "found_tokens": 768,
        "restored_tokens": 256,
        "stored_tokens": 0,
        "first_tokens": 1,
        "first_token_s": 0.5,
        "saved_s": 1.0,
        "lost_s": 0.25,
    }
