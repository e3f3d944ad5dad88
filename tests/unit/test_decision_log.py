"""The decision log: the last decisions, by number and by request, each concluded once."""

from dataclasses import replace

import pytest

from kvtier.core.fate import Fate
from kvtier.core.identity import HASH_BYTES
from kvtier.core.limits import (
    CHAIN_BLOCKS_MAX,
    COLD_TIMES_MAX,
    DECISIONS_BYTES_MAX,
    DECISIONS_MAX,
    OUTCOME_LATE_NS,
)
from kvtier.core.plan import EngineLoad, PlanOutcome, PlanReason, RestorePlan
from kvtier.core.planner import PlanEvaluation, PlanRequest
from kvtier.core.residency import TierName
from kvtier.node.state.decision_log import DecisionLog, LoggedDecision

ASK = PlanRequest(bytes(16), (), 0, 640, 64, 3000, None, EngineLoad(), can_split=False)
WORTH = PlanEvaluation({}, {}, 0.0, "recompute")


def note(decision_log, request_id="", session="s", at_ns=0):
    number = decision_log.next_number()
    plan = RestorePlan(number, 0, PlanReason.NOTHING)
    decision_log.add(LoggedDecision(number, request_id, session, "engine", at_ns, ASK, plan))
    return number


def outcome_of(number):
    return PlanOutcome(number, (), 0.0, 640, 0.1, 0.0, 0.1)


def test_a_decision_is_found_by_its_number_and_by_its_request():
    decision_log = DecisionLog()
    number = note(decision_log, "r1")
    assert decision_log.find(number) is decision_log.find_request("r1")
    assert decision_log.find(number + 1) is None
    assert decision_log.find_request("r2") is None
    assert decision_log.find_request("") is None


def test_the_last_decision_about_a_request_counts():
    decision_log = DecisionLog()
    numbers = [note(decision_log, "r") for _ in range(3)]
    assert decision_log.find_request("r").number == numbers[-1]


def test_a_request_is_found_by_the_id_that_its_client_was_told():
    decision_log = DecisionLog()
    numbers = [note(decision_log, f"cmpl-12-{prompt}-0badc0de") for prompt in range(2)]
    note(decision_log, "cmpl-123-0-0badc0de")
    assert decision_log.find_request("cmpl-12").number == numbers[1]
    assert decision_log.find_request("cmpl-12-0").number == numbers[0]
    assert decision_log.find_request("cmpl-1") is None
    assert decision_log.find_request("") is None


def test_numbers_are_never_used_twice():
    decision_log = DecisionLog()
    numbers = [note(decision_log) for _ in range(3 * DECISIONS_MAX)]
    assert len(set(numbers)) == len(numbers)
    assert 0 not in numbers  # which says that there is none


def test_the_oldest_are_forgotten():
    decision_log = DecisionLog()
    numbers = [note(decision_log, f"r{n % 5000}") for n in range(2 * DECISIONS_MAX)]
    assert len(decision_log) == DECISIONS_MAX
    assert decision_log.find(numbers[0]) is None
    assert decision_log.find_request("r4999") is not None
    assert decision_log.find_request("r4500") is None or decision_log.find_request("r4500").number
    assert len(decision_log._by_request) <= DECISIONS_MAX


def test_a_request_that_is_decided_about_again_and_again_is_remembered():
    decision_log = DecisionLog()
    for _ in range(DECISIONS_MAX + 10):
        number = note(decision_log, "the same")
    assert decision_log.find_request("the same").number == number


def test_an_outcome_is_taken_once_from_whom_it_concerns_and_in_time():
    decision_log = DecisionLog()
    number = note(decision_log, session="s", at_ns=5)
    assert decision_log.open(number, "another", 10) is None
    assert decision_log.open(number, "s", OUTCOME_LATE_NS + 6) is None
    assert decision_log.open(number + 7, "s", 10) is None
    assert decision_log.open(number, "s", 10) is decision_log.find(number)
    decision_log.close(number, outcome_of(number), WORTH)
    assert decision_log.find(number).evaluation is WORTH
    assert decision_log.open(number, "s", 10) is None


def conclude(decision_log, hashes, outcome, ask=ASK):
    """Record a decision and its outcome; returns the decision without the outcome."""
    number = decision_log.next_number()
    plan = RestorePlan(number, 0, PlanReason.NOTHING)
    decision = LoggedDecision(number, "", "s", "engine", 0, ask, plan, hashes=hashes)
    decision_log.add(decision)
    decision_log.close(number, replace(outcome, decision=number), WORTH)
    return decision


def test_the_measured_time_of_a_prompt_is_found_for_the_same_prompt():
    decision_log = DecisionLog()
    cold = replace(outcome_of(0), ttft_s=2.5, wait_s=0.5)
    decision = conclude(decision_log, b"a" * HASH_BYTES + b"b" * HASH_BYTES, cold)
    assert decision_log.cold_s(decision) == 2.0
    conclude(decision_log, decision.hashes, replace(cold, ttft_s=2.0))
    conclude(decision_log, decision.hashes, replace(cold, ttft_s=9.0))
    assert decision_log.cold_s(decision) == 1.5, "the shortest time counts"
    assert decision_log.cold_s(replace(decision, hashes=b"a" * HASH_BYTES)) is None, (
        "a shorter prompt"
    )
    assert decision_log.cold_s(replace(decision, hashes=b"")) is None


@pytest.mark.parametrize(
    ("ask", "outcome"),
    [
        (ASK, replace(outcome_of(0), tiers=((TierName.CPU, 1),))),
        (ASK, replace(outcome_of(0), computed_tokens=639)),
        (replace(ASK, first_token=64), outcome_of(0)),
    ],
    ids=["restored", "shared with another request", "partly on the GPU"],
)
def test_a_prompt_that_was_not_computed_in_full_has_no_cold_time(ask, outcome):
    decision_log = DecisionLog()
    assert decision_log.cold_s(conclude(decision_log, b"a" * HASH_BYTES, outcome, ask)) is None


@pytest.mark.slow
def test_the_oldest_cold_times_are_forgotten():
    decision_log = DecisionLog()
    first = conclude(decision_log, bytes(HASH_BYTES), outcome_of(0))
    for number in range(1, COLD_TIMES_MAX + 1):
        last = conclude(decision_log, number.to_bytes(HASH_BYTES), outcome_of(0))
    assert decision_log.cold_s(first) is None
    assert decision_log.cold_s(last) == pytest.approx(0.1)


def test_what_did_not_come_is_added():
    decision_log = DecisionLog()
    number = note(decision_log, "r")
    decision_log.add_missed(number, Fate.DEADLINE, 2)
    decision_log.add_missed(number, Fate.DEADLINE, 3)
    decision_log.add_missed(number + 1, Fate.DEADLINE, 3)  # forgotten, or never made
    assert decision_log.find_request("r").missed == {Fate.DEADLINE: 5}


def test_long_chains_are_remembered_within_their_bytes():
    decision_log = DecisionLog()
    longest = bytes(CHAIN_BLOCKS_MAX * HASH_BYTES)
    plan = RestorePlan(0, 0, PlanReason.NOTHING)
    for number in range(1, 301):
        decision_log.add(
            LoggedDecision(number, f"r{number}", "s", "engine", 0, ASK, plan, hashes=longest)
        )
    assert len(decision_log) == DECISIONS_BYTES_MAX // len(longest)
    assert decision_log.find_request("r300") is not None
    assert decision_log.find_request("r1") is None


def test_long_chains_leave_room_for_fewer():
    decision_log = DecisionLog()
    hashes = bytes(DECISIONS_BYTES_MAX // 8)
    for n in range(40):
        number = decision_log.next_number()
        plan = RestorePlan(number, 0, PlanReason.NOTHING)
        decision_log.add(
            LoggedDecision(number, f"r{n}", "s", "engine", 0, ASK, plan, hashes=hashes)
        )
    assert len(decision_log) == 8
    assert decision_log.find_request("r39").number == number
    assert decision_log.find_request("r30") is None
