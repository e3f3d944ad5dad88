"""What ``kvtier top`` makes of documents, and how its frames fit windows."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from test_stat import HUGE, busy, document

from kvtier.cli.top import Poller, StatusView
from kvtier.cli.top_frame import WindowSize, render_frame
from kvtier.core.fate import Fate
from kvtier.core.plan import PlanReason
from kvtier.errors import StartError


def shown(view: StatusView, columns: int = 80, lines: int = 24, **more: Any) -> list[str]:
    return [
        line.plain for line in render_frame(view, WindowSize(columns, lines, **more), "q quits")
    ]


# Polling


def poller(
    answers: list[dict[str, Any] | Exception], interval_s: float = 1.0
) -> tuple[Poller, list[float]]:
    clock = [100.0]

    def fetch() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Poller(fetch, interval_s, lambda: clock[0]), clock


def test_what_was_told_grows_old_until_something_new_is_told() -> None:
    fault = StartError("daemon.socket", "is away", "start it")
    asked, clock = poller([document(), fault, document()])
    assert asked.view().document is None
    asked.step()
    clock[0] += 3.5
    asked.step()
    looked = asked.view()
    assert looked.document == document()
    assert (looked.age_s, looked.is_old) == (3.5, True)
    assert "is away" in looked.problem
    asked.step()
    assert asked.view().problem == ""
    assert not asked.view().is_old


def test_an_older_daemon_is_told_from_one_that_is_away() -> None:
    old = document()
    del old["grown"]
    asked, _ = poller([old])
    asked.step()
    assert "kvtier 0.1.0" in asked.view().problem
    assert "use the kvtier of the daemon's version" in asked.view().problem


def test_a_bug_on_the_thread_is_not_silent() -> None:
    asked, _ = poller([ZeroDivisionError("ours")])
    with asked:
        assert asked.news
        asked._thread.join(30)
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
            "cold_s": None if number % 3 else 99_999.0,
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
            "lately": {
                **dict.fromkeys(
                    ("requests", "prompt_tokens", "restored_tokens", "first_tokens"), HUGE
                ),
                "first_token_s": 1e9,
            },
        }
        for number in range(64)
    ]
    for name in ("cpu", "ssd"):
        most["tiers"][name] |= {"state": "degraded", "reason": "read-only: " + "no room " * 20}
    most["tiers"]["ssd"]["detail"] = {"write_budget_bytes": HUGE}
    lately = most["grown"]["lately"]
    lately |= {"seconds": 10.0, "decisions": {reason.value: HUGE for reason in PlanReason}}
    lately["moved_bytes"] = dict.fromkeys(lately["moved_bytes"], 10**15)
    lately["served_tokens"] = dict.fromkeys(lately["served_tokens"], HUGE)
    lately["missed_blocks"] = {fate.value: HUGE for fate in Fate}
    return most


@pytest.mark.parametrize("make", [document, full], ids=["fresh", "full"])
@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (60, 12), (200, 60), (20, 3), (1, 1)])
def test_a_frame_fits_any_window_and_no_word_is_cut(
    make: Callable[[], dict[str, Any]], columns: int, lines: int
) -> None:
    now = make()
    narrow = shown(StatusView(now, problem="no answer " * 50), columns, lines)
    assert len(narrow) <= lines
    wide = shown(StatusView(now, problem="no answer " * 50), max(80, columns), lines)
    for line in narrow:
        assert cell_len(line) <= columns
        whole = next((each for each in wide if each.startswith(line)), None)
        if columns >= 20 and whole and whole != line:
            assert whole[len(line)] == " " or line == "", f"{line!r} ends in the middle of a word"


def test_a_window_of_24_lines_has_every_part() -> None:
    lines = shown(StatusView(full()))
    text = "\n".join(lines)
    for part in ("kvtier 0.1.0", "saved", "tier ", "cpu → ssd", "decisions", "engine ", "request "):
        assert part in text, f"{part}\n{text}"
    assert "and 63 more" in text
    assert max(map(len, lines)) == 80


def test_a_larger_window_has_more_engines_and_requests() -> None:
    large = "\n".join(shown(StatusView(full()), 160, 60))
    assert len(re.findall(r"^engine \d+ with a rather long name ", large, re.MULTILINE)) > 5
    assert large.count("chatcmpl-") > 10
    assert f"chatcmpl-{3:032x}-with-more" in large


def test_it_says_what_restoring_saved_of_what() -> None:
    now = document()
    minute = now["grown"]["minute"]
    minute |= {"seconds": 60.0, "saved_s": 5.0, "lost_s": 1.0, "actual_s": 6.0}
    assert shown(StatusView(now))[1] == "saved 4 s of 10 s time to first token in the last 60 s"
    now["worth"] |= {"saved_s": 4.5, "saved_measured_s": 1.5}
    assert "since start: saved 4.5 s (1.5 s measured), lost 0 ms" in shown(StatusView(now))[2]
    minute |= {"seconds": 5.0, "saved_s": 0.0, "lost_s": 0.0}
    assert shown(StatusView(now))[1] == "no restores in the last 5 s"


def test_rates_are_over_the_time_that_counters_grew_in() -> None:
    now = full()
    lately = now["grown"]["lately"]
    lately["decisions"] = {"cost": 30, "all": 120}
    now["engines"][0]["lately"] |= {"requests": 40, "first_tokens": 4, "first_token_s": 2.0}
    text = "\n".join(shown(StatusView(now)))
    assert "decisions      all 12/s, cost 3/s\n" in text
    assert re.search(r"^engine 0 .* 4/s .* 500 ms ", text, re.MULTILINE), text
    lately["seconds"] = 0.0  # the daemon has just begun
    assert " 0/s, " in "\n".join(shown(StatusView(now)))


def test_the_age_of_what_is_shown_stands_at_the_top() -> None:
    lines = shown(StatusView(document(), age_s=75.0, is_old=True, problem="no daemon answers"))
    assert lines[0].endswith("75 s old")
    assert "no daemon answers" in lines
    assert "q quits" not in lines[0]


def test_nothing_that_a_client_says_steers_the_terminal() -> None:
    evil = full()
    evil["requests"][0]["request_id"] = "\x1b[2J\nred"
    evil["engines"][0]["engine"] = "漢字\u202e\x07" * 20
    evil["tiers"]["cpu"]["reason"] = "\x1b]0;title\x07"
    lines = shown(StatusView(evil, problem="\r\x1b[0m"))
    assert "".join(lines).isprintable()
    assert all(cell_len(line) <= 80 for line in lines)


def test_a_terminal_without_other_letters_is_given_none() -> None:
    lines = shown(StatusView(full()), is_ascii=True)
    assert "\n".join(lines).isascii()
