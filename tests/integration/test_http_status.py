"""The status page's routes: what they tell, whom they answer, and what they cost the loop."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

import kvtier.api.http
from kvtier.api.http import daemon_app
from kvtier.api.http.daemon_app import StatusCache, create_daemon_app
from kvtier.api.http.server import serve
from kvtier.daemon.status.explain import PLAN_SENTENCES

PAGE = Path(kvtier.api.http.__file__).parent / "status_page"
PATHS = ["/", *(f"/status/{path.name}" for path in PAGE.iterdir() if path.name != "page.html")]
REQUEST = {"request_id": "cmpl-ann.smith@example.org-0", "prompt_tokens": 7}


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run a loop that stands for the node's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@contextmanager
def page(make: Callable[[], Any] | None, loop: asyncio.AbstractEventLoop) -> Iterator[httpx.Client]:
    app = create_daemon_app(
        complaint=str,
        is_ready=lambda: True,
        report=dict,
        registry=CollectorRegistry(),
        status=StatusCache(make, loop) if make else None,
    )
    with (
        serve(app, "127.0.0.1", 0, grace_seconds=1) as server,
        httpx.Client(base_url=server.url, timeout=20) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    document = {
        "version": "1",
        "requests": [REQUEST, REQUEST | {"request_id": "short"}],
        "key_spaces": [{"names": ["llama"]}],
        "policy": {"classes": [{"tenant": "ab12"}]},
    }
    with loop_thread() as loop, page(lambda: document, loop) as client:
        yield client


def test_the_network_is_told_less_than_operators(client):
    told = client.get("/status.json").json()
    assert told == {
        "version": "1",
        "requests": [
            {"request_id": "cmpl-ann.smith@e…", "prompt_tokens": 7},
            {"request_id": "short", "prompt_tokens": 7},
        ],
    }


@pytest.mark.parametrize("path", [*PATHS, "/status.json"])
def test_every_answer_keeps_to_itself(client, path):
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.headers["cache-control"] == "no-store"
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cross-origin-resource-policy"] == "same-origin"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert client.head(path).status_code == 200
    for method in ("POST", "PUT", "DELETE"):
        assert client.request(method, path).status_code == 405


@pytest.mark.parametrize("path", PATHS)
def test_the_page_is_made_of_nothing_from_outside(client, path):
    text = client.get(path).text
    for target in re.findall(r"""(?:src|href|from|import)\s*=?\s*["'](\.?/[^"']*)["']""", text):
        where = target.replace("./", "/status/")
        assert client.get(where).status_code == 200, f"{path} needs {target}"
    # A namespace is a name, not an address.
    assert "//" not in re.sub(r"http://www\.w3\.org/2000/svg|(?m:^//.*| // .*)", "", text)
    assert not re.search(
        r"<style|<script>|\sstyle=|\son\w+=|innerHTML|eval\(|document\.write", text
    )


def test_the_page_says_why_in_the_words_of_explain(client):
    script = client.get("/status/picture.js").text
    for reason, sentence in PLAN_SENTENCES.items():
        assert f'  {reason}: "{sentence}",' in script


def test_pages_of_other_sites_cannot_read_the_status(client):
    for path in ("/", "/status.json"):
        assert client.get(path, headers={"host": "evil.example"}).status_code == 421
        assert client.get(path, headers={"origin": "https://elsewhere.example"}).status_code == 403


def test_without_the_page_there_is_none():
    with loop_thread() as loop, page(None, loop) as client:
        for path in (*PATHS, "/status.json"):
            assert client.get(path).status_code == 404
        assert client.get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_crowd_costs_one_document(monkeypatch):
    monkeypatch.setattr(daemon_app, "_SHARED_S", 60.0)  # however late the last of them comes
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"version": "1"}

    with loop_thread() as loop, page(make, loop) as client, ThreadPoolExecutor(16) as crowd:
        # Held up meanwhile, so that all of them wait for the same answer.
        begun, held = threading.Event(), threading.Event()
        loop.call_soon_threadsafe(lambda: (begun.set(), held.wait(60)))
        assert begun.wait(30)
        replies = [crowd.submit(client.get, "/status.json") for _ in range(16)]
        held.set()
        assert {reply.result(20).status_code for reply in replies} == {200}
        assert len(made) == 1


@pytest.mark.slow
def test_a_loop_that_hangs_is_asked_once_and_said_to():
    made: list[int] = []

    def make() -> dict[str, Any]:
        made.append(1)
        return {"version": "1"}

    with loop_thread() as loop, page(make, loop) as client, ThreadPoolExecutor(8) as crowd:
        held = threading.Event()
        loop.call_soon_threadsafe(held.wait, 60)
        replies = [crowd.submit(client.get, "/status.json") for _ in range(8)]
        for reply in (each.result(40) for each in replies):
            assert reply.status_code == 503
            assert reply.elapsed.total_seconds() < 20
            message = reply.json()["error"]["message"]
            assert re.fullmatch(r"the daemon has not responded for \d+ s", message)
        assert client.get("/healthz").status_code == 200
        assert not made
        held.set()
        assert client.get("/status.json").status_code == 200
        assert len(made) == 1


def test_a_bug_in_the_document_is_told_without_its_trace():
    faults = [RuntimeError("secret")]

    def make() -> dict[str, Any]:
        if faults:
            raise faults.pop()
        return {"version": "1"}

    with loop_thread() as loop, page(make, loop) as client:
        reply = client.get("/status.json")
        assert reply.status_code == 503
        assert "see the daemon's log" in reply.json()["error"]["message"]
        assert "secret" not in reply.text
        assert client.get("/status.json").json()["version"] == "1"


def test_a_loop_that_has_ended_is_said_to():
    with loop_thread() as loop:
        pass
    with page(dict, loop) as client:
        reply = client.get("/status.json")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"] == "the daemon has stopped"
