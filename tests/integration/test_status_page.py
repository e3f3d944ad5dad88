"""The status page in a browser: it shows what ``stat`` says, and says when nobody answers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect

from kvtier.cli.formatting import format_bytes, format_count
from kvtier.core.request import RequestTraits
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.asking import Users
from tests.integration.conftest import SHOWN_MS
from tests.integration.pattern import PatternEngine
from tests.unit.test_formatting import SHOWN

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>alert(1)</script>" + "n" * 40


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        node = RunningNode(directory, {"cpu.capacity": "1MiB"})
        with node.daemon():
            yield node


@dataclass
class Watched:
    """A page with what it said on its console and asked the network for."""

    page: Page
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def note_request(self, request: Request) -> None:
        self.asked.append(request.url)

    def polls(self) -> int:
        return sum(url.endswith("/status.json") for url in self.asked)

    def assert_silent(self) -> int:
        """Fail where it asks within a minute by its own clock; returns how often it has so far."""
        asked = self.polls()
        self.page.clock.run_for(60_000)
        with self.page.expect_request("**/icon.svg"):  # what was asked before is seen before
            self.page.evaluate("fetch('/status/icon.svg', {cache: 'no-store'}).then(() => null)")
        assert self.polls() == asked
        return asked

    def await_life(self, pattern: str) -> None:
        expect(self.page.locator("#said")).to_have_text(re.compile(pattern))


@contextmanager
def opened(
    browser: Browser, node: RunningNode, width: int = 1280, **options: Any
) -> Iterator[Watched]:
    with browser.new_context(viewport={"width": width, "height": 900}, **options) as context:
        watched = Watched(context.new_page())
        watched.page.on("console", lambda said: watched.errors.append(said.text))
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on("request", watched.note_request)
        watched.page.goto(f"http://127.0.0.1:{node.http_port}/")
        yield watched


def cells(page: Page, table: str) -> list[list[str]]:
    """Return the text of a table's cells, row by row."""
    rows = page.get_by_role("table", name=table).locator("tbody tr")
    return [row.get_by_role("cell").all_inner_texts() for row in rows.all()]


def test_it_shows_what_stat_says(browser: Browser, node: RunningNode) -> None:
    with opened(browser, node) as watched, Users(node.socket, name=HOSTILE) as users:
        page = watched.page
        await_true(lambda: users.num_asked > 30, "requests were made")
        moving = page.locator("svg.flow.wide .moves.from-cpu")
        expect(moving.first).to_be_visible(timeout=SHOWN_MS)
        expect(page.locator("#worth strong")).not_to_have_text("0 ms")
        before = page.locator("#worth strong").inner_text()
        expect(page.locator("#worth strong")).not_to_have_text(before)
    with opened(browser, node) as watched, PatternEngine(node.socket, name=HOSTILE) as engine:
        page = watched.page
        engine.ask(1, 4, RequestTraits(request_id="cmpl-0123456789abcdef-0"))
        expect(page.locator("#requests")).to_contain_text("cmpl-0123456789a…")
        told = node.await_idle()
        expect(page.locator("#ends")).to_contain_text("pins 0")

        def is_same() -> bool:
            rows = cells(page, "Tiers")
            expected = [
                [
                    format_count(told["tiers"][tier]["blocks"]),
                    format_count(told["tiers"][tier]["tokens"]),
                    format_count(told["tokens"]["found"][tier]),
                    format_count(told["tokens"]["loaded"][tier]),
                ]
                for tier in ("cpu", "ssd")
            ]
            assert [row[1] for row in rows] == ["◇ unknown", "● up", "● up", "○ off"]
            held = f"{format_bytes(told['tiers']['cpu']['used_bytes'])} of 1 MiB"
            return [row[3:] for row in rows[1:3]] == expected and rows[1][2] == held

        await_true(is_same, "the tiers are those of stat")
        decided = {row[0]: row[3] for row in cells(page, "Decisions by reason")}
        decisions = told["worth"]["decisions"]
        assert decided == {name: format_count(number) for name, number in decisions.items()}
        assert cells(page, "Engines")[0][0] == HOSTILE
        assert page.locator("#picture img").count() == 0
        assert "saved" in page.title()
        assert not watched.errors
        home = f"http://127.0.0.1:{node.http_port}/"
        assert all(url.startswith(home) for url in watched.asked), watched.asked


def test_numbers_are_those_of_the_command_line(browser: Browser, node: RunningNode) -> None:
    with opened(browser, node) as watched:
        told = watched.page.evaluate(
            """async (shown) => {
                const forms = await import("/status/number.js");
                return Object.fromEntries(Object.entries(shown).map(([name, cases]) => (
                    [name, cases.map(([number]) => forms[name](number))])));
            }""",
            SHOWN,
        )
    assert told == {name: [text for _, text in cases] for name, cases in SHOWN.items()}


def test_what_was_saved_in_a_minute_is_not_extrapolated(
    browser: Browser, node: RunningNode
) -> None:
    steps = [{"seconds": 5, "saved_s": 2.0 * (number == 2), "lost_s": 0} for number in range(20)]
    with opened(browser, node) as watched:
        told = watched.page.evaluate(
            """async (steps) => (await import("/status/picture.js")).netByMinute(steps)""", steps
        )
    assert told == [0] * 2 + [2] * 12 + [0] * 6


def test_it_asks_nothing_while_nobody_looks(browser: Browser, node: RunningNode) -> None:
    with opened(browser, node) as watched:
        page = watched.page
        page.clock.install()
        page.reload()
        watched.await_life("live")
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Enter")
        watched.await_life("paused at [0-9:]{8}")
        watched.assert_silent()
        page.keyboard.press("Enter")
        watched.await_life("live")
        page.evaluate("""() => {
            Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        asked = watched.assert_silent()
        page.evaluate("""() => {
            delete document.hidden;
            document.dispatchEvent(new Event("visibilitychange"));
        }""")
        await_true(lambda: page.title() and watched.polls() > asked, "it asks again")
        assert not watched.errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_whatever_it_is_shown_on(browser: Browser, node: RunningNode, scheme: Any) -> None:
    with (
        PatternEngine(node.socket, name=HOSTILE.replace(" ", "")[:120]) as engine,
        opened(browser, node, color_scheme=scheme) as watched,
    ):
        engine.ask(2, 4, RequestTraits(request_id="x" * 120))
        page = watched.page
        expect(page.locator("#requests")).to_contain_text("x" * 16 + "…")
        for width in (1280, 1040, 1000, 720, 360):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            plan = "wide" if width > 700 else "narrow"
            expect(page.locator("svg.flow:visible")).to_have_class(f"flow {plan}")
            fits = "node => node.scrollWidth <= node.parentNode.clientWidth"
            for table in page.get_by_role("table").all():
                assert table.evaluate(fits), (width, table.inner_text())
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 21, 27)"
        assert dark == (scheme == "dark")


def test_it_says_since_when_nobody_answers_and_goes_on(browser: Browser) -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon() as daemon, opened(browser, node) as watched:
            page = watched.page
            watched.await_life("live")
            boot = page.locator("#ends").inner_text()
            with daemon.stopped():
                watched.await_life("no data since [0-9:]{8}: timed out")
                expect(page.locator("#since")).to_have_text(
                    re.compile(r"data is \d+ s old"), timeout=SHOWN_MS
                )
                expect(page.locator("#picture")).to_have_class("stale")
                assert "no data" in page.title()
            watched.await_life("live")
            expect(page.locator("#since")).to_have_text("")
            daemon.kill()
            daemon.wait()
            watched.await_life("no answer since [0-9:]{8}$")
            expect(page.locator("#ends")).to_have_text(boot)
            with node.daemon():
                watched.await_life("live")
                expect(page.locator("#ends")).not_to_have_text(boot)
            watched.await_life("no answer")
            with node.daemon(http__status_page="false"):
                watched.await_life("no data since [0-9:]{8}: not found: /status.json")
                connection = HTTPConnection("127.0.0.1", node.http_port, timeout=10)
                connection.request("GET", "/")
                assert connection.getresponse().status == 404
                connection.close()
