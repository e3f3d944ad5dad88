"""What the daemon tells of the last minutes: how its counters grew, and how fast."""

from typing import Any

from kvtier.daemon.status.counter_history import CounterHistory, CounterSnapshot, grown


def noted(seconds: float, **counters: Any) -> CounterSnapshot:
    return CounterSnapshot({"seconds": seconds, **counters}, {})


def test_a_window_is_as_long_as_was_asked_or_a_step_longer() -> None:
    history = CounterHistory()
    for step in range(100):
        history.note(noted(5.0 * step, leases=step))
    now = noted(497.0, leases=100)
    begins = [history.before(now, seconds).counters["seconds"] for seconds in (2, 10, 60)]
    assert begins == [495.0, 485.0, 435.0]
    assert grown(history.before(now, 60).counters, now.counters) == {"seconds": 62, "leases": 13}


def test_a_young_daemon_tells_what_there_is() -> None:
    history, now = CounterHistory(), noted(3.0, leases=7)
    assert history.before(now, 60) is now
    history.note(noted(1.0, leases=1))
    assert grown(history.before(now, 60).counters, now.counters) == {"seconds": 2, "leases": 6}


def test_after_a_silence_a_window_is_all_of_it() -> None:
    history = CounterHistory()
    for seconds in (0.0, 5.0, 300.0):
        history.note(noted(seconds))
    assert history.before(noted(302.0), 10).counters["seconds"] == 5.0


def test_a_sum_over_engines_that_falls_did_not_grow() -> None:
    before = {"hits": 500, "by": {"gpu": 7}}
    assert grown(before, {"hits": 5, "by": {"gpu": 9, "new": 4}}) == {
        "hits": 0,
        "by": {"gpu": 2, "new": 4},
    }


def test_steps_reach_back_five_minutes_and_no_further() -> None:
    history = CounterHistory()
    for step in range(200):
        history.note(noted(5.0 * step, asked=step * step, by={"gpu": step}))
    steps = history.steps()
    assert sum(each["seconds"] for each in steps) == 300.0
    assert steps[0].keys() == {"seconds", "asked"}, "a curve is drawn of numbers"
    assert (steps[0]["asked"], steps[-1]["asked"]) == (140**2 - 139**2, 199**2 - 198**2)
