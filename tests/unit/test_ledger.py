"""The ledger: the last decisions, by number and by request, each concluded once."""

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
from kvtier.node.ledger import Ledger, LoggedDecision

ASK = PlanRequest(bytes(16), (), 0, 640, 64, 3000, None, EngineLoad(), can_split=False)
WORTH = PlanEvaluation({}, {}, 0.0, "recompute")


def note(ledger, request_id="", session="s", at_ns=0):
    number = ledger.next_number()
    plan = RestorePlan(number, 0, PlanReason.NOTHING)
    ledger.add(LoggedDecision(number, request_id, session, "engine", at_ns, ASK, plan))
    return number


def outcome_of(number):
    return PlanOutcome(number, (), 0.0, 640, 0.1, 0.0, 0.1)


def test_a_decision_is_found_by_its_number_and_by_its_request():
    ledger = Ledger()
    number = note(ledger, "r1")
    assert ledger.find(number) is ledger.find_request("r1")
    assert ledger.find(number + 1) is None
    assert ledger.find_request("r2") is None
    assert ledger.find_request("") is None


def test_the_last_decision_about_a_request_counts():
    ledger = Ledger()
    numbers = [note(ledger, "r") for _ in range(3)]
    assert ledger.find_request("r").number == numbers[-1]


def test_a_request_is_found_by_the_id_that_its_client_was_told():
    ledger = Ledger()
    numbers = [note(ledger, f"cmpl-12-{prompt}-0badc0de") for prompt in range(2)]
    note(ledger, "cmpl-123-0-0badc0de")
    assert ledger.find_request("cmpl-12").number == numbers[1]
    assert ledger.find_request("cmpl-12-0").number == numbers[0]
    assert ledger.find_request("cmpl-1") is None
    assert ledger.find_request("") is None


def test_numbers_are_never_used_twice():
    ledger = Ledger()
    numbers = [note(ledger) for _ in range(3 * DECISIONS_MAX)]
    assert len(set(numbers)) == len(numbers)
    assert 0 not in numbers  # which says that there is none


def test_the_oldest_are_forgotten():
    ledger = Ledger()
    numbers = [note(ledger, f"r{n % 5000}") for n in range(2 * DECISIONS_MAX)]
    assert len(ledger) == DECISIONS_MAX
    assert ledger.find(numbers[0]) is None
    assert ledger.find_request("r4999") is not None
    assert ledger.find_request("r4500") is None or ledger.find_request("r4500").number
    assert len(ledger._by_request) <= DECISIONS_MAX


def test_a_request_that_is_decided_about_again_and_again_is_remembered():
    ledger = Ledger()
    for _ in range(DECISIONS_MAX + 10):
        number = note(ledger, "the same")
    assert ledger.find_request("the same").number == number


def test_an_outcome_is_taken_once_from_whom_it_concerns_and_in_time():
    ledger = Ledger()
    number = note(ledger, session="s", at_ns=5)
    assert ledger.open(number, "another", 10) is None
    assert ledger.open(number, "s", OUTCOME_LATE_NS + 6) is None
    assert ledger.open(number + 7, "s", 10) is None
    assert ledger.open(number, "s", 10) is ledger.find(number)
    ledger.close(number, outcome_of(number), WORTH)
    assert ledger.find(number).evaluation is WORTH
    assert ledger.open(number, "s", 10) is None


def conclude(ledger, hashes, outcome, ask=ASK):
    """Record a decision and its outcome; returns the decision without the outcome."""
    number = ledger.next_number()
    plan = RestorePlan(number, 0, PlanReason.NOTHING)
    decision = LoggedDecision(number, "", "s", "engine", 0, ask, plan, hashes=hashes)
    ledger.add(decision)
    ledger.close(number, replace(outcome, decision=number), WORTH)
    return decision


def test_the_measured_time_of_a_prompt_is_found_for_the_same_prompt():
    ledger = Ledger()
    cold = replace(outcome_of(0), ttft_s=2.5, wait_s=0.5)
    decision = conclude(ledger, b"a" * HASH_BYTES + b"b" * HASH_BYTES, cold)
    assert ledger.cold_s(decision) == 2.0
    conclude(ledger, decision.hashes, replace(cold, ttft_s=2.0))
    conclude(ledger, decision.hashes, replace(cold, ttft_s=9.0))
    assert ledger.cold_s(decision) == 1.5, "the shortest time counts"
    assert ledger.cold_s(replace(decision, hashes=b"a" * HASH_BYTES)) is None, "a shorter prompt"
    assert ledger.cold_s(replace(decision, hashes=b"")) is None


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
    ledger = Ledger()
    assert ledger.cold_s(conclude(ledger, b"a" * HASH_BYTES, outcome, ask)) is None


@pytest.mark.slow
def test_the_oldest_cold_times_are_forgotten():
    ledger = Ledger()
    first = conclude(ledger, bytes(HASH_BYTES), outcome_of(0))
    for number in range(1, COLD_TIMES_MAX + 1):
        last = conclude(ledger, number.to_bytes(HASH_BYTES), outcome_of(0))
    assert ledger.cold_s(first) is None
    assert ledger.cold_s(last) == pytest.approx(0.1)


def test_what_did_not_come_is_added():
    ledger = Ledger()
    number = note(ledger, "r")
    ledger.add_missed(number, Fate.DEADLINE, 2)
    ledger.add_missed(number, Fate.DEADLINE, 3)
    ledger.add_missed(number + 1, Fate.DEADLINE, 3)  # forgotten, or never made
    assert ledger.find_request("r").missed == {Fate.DEADLINE: 5}


def test_long_chains_are_remembered_within_their_bytes():
    ledger = Ledger()
    longest = bytes(CHAIN_BLOCKS_MAX * HASH_BYTES)
    plan = RestorePlan(0, 0, PlanReason.NOTHING)
    for number in range(1, 301):
        ledger.add(
            LoggedDecision(number, f"r{number}", "s", "engine", 0, ASK, plan, hashes=longest)
        )
    assert len(ledger) == DECISIONS_BYTES_MAX // len(longest)
    assert ledger.find_request("r300") is not None
    assert ledger.find_request("r1") is None


def test_long_chains_leave_room_for_fewer():
    ledger = Ledger()
    hashes = bytes(DECISIONS_BYTES_MAX // 8)
    for n in range(40):
        number = ledger.next_number()
        plan = RestorePlan(number, 0, PlanReason.NOTHING)
        ledger.add(LoggedDecision(number, f"r{n}", "s", "engine", 0, ASK, plan, hashes=hashes))
    assert len(ledger) == 8
    assert ledger.find_request("r39").number == number
    assert ledger.find_request("r30") is None
