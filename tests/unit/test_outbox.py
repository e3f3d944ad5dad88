"""What a client has yet to say: bounded, in order, and taken back where a lookup says it."""

import threading

from kvtier.client.outbox import Announcement, Outbox
from kvtier.core.identity import HASH_BYTES, NO_TENANT, BlockHash
from kvtier.core.limits import (
    ANNOUNCED_BYTES_MAX,
    ANNOUNCED_MAX,
    ENDED_REQUESTS_MAX,
    OUTCOMES_MAX,
    STEPS_MAX,
)
from kvtier.core.plan import EngineLoad, PlanOutcome, StepSample
from kvtier.core.request import RequestTraits


def request(name: str, num_blocks: int = 1) -> Announcement:
    hashes = [BlockHash(bytes(HASH_BYTES))] * num_blocks
    return Announcement(RequestTraits(request_id=name), NO_TENANT, hashes, 0)


def step(seconds: float) -> StepSample:
    return StepSample(1, 0, 1.0, 0, seconds)


def outcome(decision: int) -> PlanOutcome:
    return PlanOutcome(decision, (), 0.0, 1, 0.1, 0.0, 0.1)


def names(box: Outbox) -> list[str]:
    """Take everything, call by call."""
    taken: list[str] = []
    while (said := box.take_announced()).requests or said.over:
        assert len(said.requests) <= ANNOUNCED_MAX
        assert len(said.over) <= ENDED_REQUESTS_MAX
        taken += [each.traits.request_id for each in said.requests]
        taken += [f"over {name}" for name in said.over]
    return taken


def test_requests_are_told_in_order_and_before_their_end() -> None:
    box = Outbox()
    box.announce([request("a")], ["a"])
    box.announce([request("b"), request("c")], [])
    box.announce([], ["c"])
    assert names(box) == ["a", "b", "c", "over a", "over c"]
    assert names(box) == []


def test_a_request_that_is_looked_up_needs_no_announcement() -> None:
    box = Outbox()
    box.announce([request("a"), request("b")], [])
    box.withdraw("a")
    box.withdraw("a")
    box.withdraw("never heard of")
    assert names(box) == ["b"]
    box.announce([request("a")], [])
    assert names(box) == ["a"], "the next one of that name is another"


def test_requests_without_a_name_are_all_told() -> None:
    box = Outbox()
    box.announce([request(""), request("")], [])
    box.withdraw("")
    assert names(box) == ["", ""]


def test_of_too_many_the_oldest_are_lost() -> None:
    box = Outbox()
    box.announce([request(str(number)) for number in range(100 * ANNOUNCED_MAX)], [])
    kept = names(box)
    assert 0 < len(kept) < 100 * ANNOUNCED_MAX
    assert kept[-1] == str(100 * ANNOUNCED_MAX - 1)
    assert kept == sorted(kept, key=int)
    box.announce([], [str(number) for number in range(100 * ENDED_REQUESTS_MAX)])
    assert 0 < len(names(box)) < 100 * ENDED_REQUESTS_MAX


def test_a_call_is_never_too_large_to_be_sent() -> None:
    most = ANNOUNCED_BYTES_MAX // HASH_BYTES
    box = Outbox()
    box.announce([request("a", most), request("b", 1), request("c", 2 * most)], [])
    said = [[each.traits.request_id for each in box.take_announced().requests] for _ in range(3)]
    assert said == [["a"], ["b"], ["c"]]


def test_a_report_has_the_newest_steps_and_the_last_load() -> None:
    box = Outbox()
    assert not box.take_measured()
    box.note_steps([step(number) for number in range(1, 2 * STEPS_MAX + 1)], EngineLoad(1, 1))
    box.note_steps([], EngineLoad(7, 2))
    for number in range(2 * OUTCOMES_MAX):
        box.note_outcome(outcome(number))
    measured = box.take_measured()
    assert [each.seconds for each in measured.steps] == [*range(STEPS_MAX + 1, 2 * STEPS_MAX + 1)]
    assert len(measured.outcomes) == OUTCOMES_MAX
    assert measured.outcomes[-1].decision == 2 * OUTCOMES_MAX - 1
    assert measured.load == EngineLoad(7, 2)
    assert not box.take_measured(), "each is told once"


def test_another_daemon_is_not_told_of_the_last_ones_requests() -> None:
    box = Outbox()
    box.announce([request("a")], ["b"])
    box.note_outcome(outcome(1))
    box.note_steps([step(0.1)], EngineLoad())
    box.begin_session()
    assert names(box) == []
    measured = box.take_measured()
    assert measured.outcomes == []
    assert len(measured.steps) == 1, "what a step takes is the same for every daemon"


def test_who_waits_is_woken_by_an_announcement_and_by_the_end() -> None:
    box = Outbox()
    woken: list[bool] = []
    waiting = threading.Thread(target=lambda: woken.append(box.wait()), daemon=True)
    waiting.start()
    box.announce([request("a")], [])
    waiting.join(30)
    assert woken == [True]
    box.take_announced()
    waiting = threading.Thread(target=lambda: woken.append(box.wait()), daemon=True)
    waiting.start()
    box.close()
    waiting.join(30)
    assert woken == [True, False]
    assert not box.wait(), "for good"
