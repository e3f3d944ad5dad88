"""What ``kvtier top`` makes of documents, and how its frames fit windows."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from test_stat_text import HUGE, busy, document

from kvtier.cli.top_frame import Size, frame
from kvtier.cli.top_poll import Change, History, Poller, View
from kvtier.errors import StartError


def told(uptime_s: float, boot: str = "a", **parts: Any) -> dict[str, Any]:
    return document() | {"uptime_s": uptime_s, "boot": boot} | parts


def view(now: dict[str, Any], before: dict[str, Any] | None = None, **more: Any) -> View:
    change = Change(before or now | {"uptime_s": now["uptime_s"] - 10}, now)
    return View(change, change, **more)


def shown(view: View, columns: int = 80, lines: int = 24, **more: Any) -> list[str]:
    return [line.plain for line in frame(view, Size(columns, lines, **more), "q quits")]


# History


def test_rates_are_taken_over_ten_seconds_and_worth_over_a_minute() -> None:
    history = History()
    for second in range(200):
        history.note(told(second / 2, leases=second))
    minute, lately = history.over(60), history.over(10)
    assert minute is not None
    assert lately is not None
    assert (minute.seconds, lately.seconds) == (60.5, 10.5)
    assert lately.per_second("leases") == 2.0


def test_after_a_silence_rates_are_over_all_of_it() -> None:
    history = History()
    for uptime_s in (0, 1, 2, 300):
        history.note(told(uptime_s, pins=uptime_s))
    change = history.over(10)
    assert change is not None
    assert (change.seconds, change.per_second("pins")) == (298, 1.0)


@pytest.mark.parametrize("after", [told(1, boot="b"), told(1)], ids=["restarted", "other clock"])
def test_a_daemon_that_began_anew_is_not_compared_with_before(after: dict[str, Any]) -> None:
    history = History()
    history.note(told(50, leases=100))
    history.note(after)
    change = history.over(60)
    assert change is not None
    assert change.seconds == change.per_second("leases") == 0


def test_a_sum_over_engines_that_falls_did_not_grow() -> None:
    gone = told(2)
    gone["tiers"] = {"gpu": {"hit_tokens": 5}}
    before = told(1)
    before["tiers"] = {"gpu": {"hit_tokens": 500}}
    change = Change(before, gone)
    assert change.of("tiers", "gpu", "hit_tokens") == 0
    assert change.of("not", "there") == 0


# Polling


def poller(answers: list[str | Exception], interval_s: float = 1.0) -> tuple[Poller, list[float]]:
    clock = [100.0]

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Poller(ask, interval_s, lambda: clock[0]), clock


def test_what_was_told_grows_old_until_something_new_is_told() -> None:
    fault = StartError("daemon.socket", "is away", "start it")
    asked, clock = poller([json.dumps(told(1)), fault, json.dumps(told(9))])
    assert asked.view().minute is None
    asked.step()
    clock[0] += 3.5
    asked.step()
    looked = asked.view()
    assert looked.minute is not None
    assert (looked.age_s, looked.is_old) == (3.5, True)
    assert "is away" in looked.problem
    asked.step()
    assert asked.view().problem == ""
    assert not asked.view().is_old


def test_an_older_daemon_is_told_from_one_that_is_away() -> None:
    old = document()
    del old["requests"]
    asked, _ = poller([json.dumps(old)])
    asked.step()
    assert "kvtier 0.1.0" in asked.view().problem
    assert "use the kvtier that it came with" in asked.view().problem


def test_a_bug_on_the_thread_is_not_silent() -> None:
    asked, _ = poller([ZeroDivisionError("ours")])
    with asked:
        assert asked.news
        asked._thread.join(10)
    with pytest.raises(ZeroDivisionError):
        asked.view()


# Frames


def requests(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {
            "request_id": f"chatcmpl-{number:032x}-with-more",
            "engine": "engine",
            "age_s": 86_400.0 * number,
            "prompt_tokens": 1_048_576,
            "restored_tokens": {"cpu": 0, "ssd": 524_288, "remote": 524_288} if number else None,
            "reason": "nothing",
            "first_token_s": 999.4 if number else None,
            "saved_s": -1234.5 if number % 2 else 98_765.4,
        }


def full() -> dict[str, Any]:
    """Return the most that there can be to say."""
    most = busy() | {"uptime_s": 400_000.0, "requests": list(requests(32))}
    most["engines"] = [
        {
            "engine": f"engine {number} with a rather long name",
            "pid": 4_194_304,
            "gpu_used_bytes": HUGE,
            "gpu_capacity_bytes": HUGE,
            "running": 1024,
            **dict.fromkeys(("requests", "prompt_tokens", "restored_tokens", "first_tokens"), HUGE),
            "first_token_s": 1e9,
        }
        for number in range(64)
    ]
    for name in ("cpu", "ssd"):
        most["tiers"][name] |= {"state": "degraded", "reason": "read-only: " + "no room " * 20}
    most["tiers"]["ssd"]["detail"] = {"write_budget_bytes": HUGE}
    for route in most["transfers"].values():
        route["bytes"] = 10**15
    most["tokens"]["loaded"] = {"cpu": HUGE, "ssd": HUGE, "remote": HUGE}
    return most


@pytest.mark.parametrize("make", [document, full], ids=["fresh", "full"])
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (60, 12), (200, 60), (20, 3), (1, 1)])
def test_a_frame_fits_any_window_and_no_word_is_cut(
    make: Callable[[], dict[str, Any]], columns: int, lines: int
) -> None:
    now = make()
    before = document() | {"uptime_s": now["uptime_s"] - 10}
    narrow = shown(view(now, before, problem="no answer " * 50), columns, lines)
    assert len(narrow) <= lines
    wide = shown(view(now, before, problem="no answer " * 50), max(80, columns), lines)
    for line in narrow:
        assert cell_len(line) <= columns
        whole = next((each for each in wide if each.startswith(line)), None)
        if columns >= 20 and whole and whole != line:
            assert whole[len(line)] == " " or line == "", f"{line!r} ends in the middle of a word"


def test_a_window_of_24_lines_has_every_part() -> None:
    lines = shown(view(full(), document() | {"uptime_s": 399_990.0}))
    text = "\n".join(lines)
    for part in ("kvtier 0.1.0", "saved", "tier ", "cpu → ssd", "decided", "engine ", "request "):
        assert part in text, f"{part}\n{text}"
    assert "and 63 more" in text
    assert max(map(len, lines)) == 80


def test_a_larger_window_has_more_engines_and_requests() -> None:
    large = "\n".join(shown(view(full()), 160, 60))
    assert len(re.findall(r"^engine \d+ with a rather long name ", large, re.MULTILINE)) > 5
    assert large.count("chatcmpl-") > 10
    assert f"chatcmpl-{3:032x}-with-more" in large


def test_it_says_what_restoring_saved_of_what() -> None:
    before, now = told(10.0), copy.deepcopy(told(70.0))
    now["worth"] |= {"saved_s": 5.0, "lost_s": 1.0}
    now["worth"]["actual_s"]["first_token"] = 6.0
    lines = shown(view(now, before))
    assert lines[1] == "saved 4 s of 10 s of time to first token in the last 60 s"
    assert shown(view(before | {"uptime_s": 15.0}, before))[1] == (
        "no restore was reported in the last 5 s"
    )
    assert shown(view(before, before))[1] == "rates come with the second look"


def test_the_age_of_what_is_shown_stands_at_the_top() -> None:
    lines = shown(view(told(1.0), age_s=75.0, is_old=True, problem="no daemon answers"))
    assert lines[0].endswith("75 s old")
    assert "no daemon answers" in lines
    assert "q quits" not in lines[0]


def test_nothing_that_a_client_says_steers_the_terminal() -> None:
    evil = full()
    evil["requests"][0]["request_id"] = "\x1b[2J\nred"
    evil["engines"][0]["engine"] = "漢字\u202e\x07" * 20
    evil["tiers"]["cpu"]["reason"] = "\x1b]0;title\x07"
    lines = shown(view(evil, problem="\r\x1b[0m"))
    assert "".join(lines).isprintable()
    assert all(cell_len(line) <= 80 for line in lines)


def test_a_terminal_without_other_letters_is_given_none() -> None:
    lines = shown(view(full()), is_ascii=True)
    assert "\n".join(lines).isascii()


def test_engines_of_one_process_are_told_apart() -> None:
    now = full()
    twins = [now["engines"][0] | {"requests": count} for count in (100, 20)]
    before = document() | {"uptime_s": now["uptime_s"] - 10, "engines": copy.deepcopy(twins)}
    now["engines"] = [twin | {"requests": twin["requests"] + 10} for twin in twins]
    text = "\n".join(shown(view(now, before), lines=40))
    assert len(re.findall(r"engine 0 .* 1/s ", text)) == 2
