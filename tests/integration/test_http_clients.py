"""Clients that stop early, leave, read slowly or come at a bad time."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry

from kvtier.api.http.app import create_app
from kvtier.api.http.limits import ServerLimits
from kvtier.api.http.server import HttpServer, serve
from kvtier.api.http.service import PromptOutcome
from kvtier.core.residency import TierName
from kvtier.engine.request import EngineRequest, FinishReason, Usage
from kvtier.testing.engine_service import ByteChatModel, FakeEngineService, ScriptedAnswer, echo


class Notes:
    """An observer who writes everything down."""

    def __init__(self) -> None:
        self.first_tokens: list[tuple[float, Counter[TierName]]] = []
        self.gaps: list[tuple[float, Counter[TierName]]] = []
        self.outcomes: list[PromptOutcome] = []

    def first_token(self, seconds: float, usage: Usage) -> None:
        self.first_tokens.append((seconds, usage.tier_tokens))

    def token_gap(self, seconds: float, usage: Usage) -> None:
        self.gaps.append((seconds, usage.tier_tokens))

    def finished(self, outcome: PromptOutcome) -> None:
        self.outcomes.append(outcome)


@contextmanager
def running(
    script: Callable[[EngineRequest], ScriptedAnswer] = echo,
    *,
    capacity: int | None = None,
    limits: ServerLimits | None = None,
    notes: Notes | None = None,
    model: ByteChatModel | None = None,
    grace_s: float = 1,
) -> Iterator[tuple[FakeEngineService, HttpServer]]:
    with FakeEngineService(script, capacity=capacity) as engine:
        app = create_app(
            engine,
            model or ByteChatModel(context_limit=1 << 20),
            registry=CollectorRegistry(),
            limits=limits,
            observer=notes,
        )
        with serve(app, "127.0.0.1", 0, grace_seconds=grace_s) as server:
            yield engine, server


def body(**fields: object) -> dict[str, object]:
    return {"model": "byte-model", "prompt": "hello", **fields}


def complete(server: HttpServer, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(**fields), timeout=20)


def events_of(response: httpx.Response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def send_call(client: socket.socket, **fields: object) -> None:
    content = json.dumps(body(**fields)).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    client.sendall(head.encode() + content)


def connect(server: HttpServer, **fields: object) -> socket.socket:
    client = socket.create_connection((server.host, server.port), timeout=20)
    send_call(client, **fields)
    return client


def pausing(request: EngineRequest) -> ScriptedAnswer:
    return ScriptedAnswer(tuple(b"never ending" * 10), pause_after=3)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(is_stream):
    notes = Notes()
    with running(pausing, notes=notes) as (engine, server):
        client = connect(server, prompt=["one", "two"], stream=is_stream)
        if is_stream:
            received = b""
            while b'"text":"v"' not in received:
                received += client.recv(4096)
        assert engine.wait_until(lambda e: len(e.requests) == 2)
        assert not engine.aborted
        client.close()
        assert engine.wait_until(lambda e: e.num_open == 0)
        assert sorted(engine.aborted) == [request.request_id for request in engine.requests]
        assert complete(server, max_tokens=2).status_code == 200, "its places are free again"
    assert notes.outcomes == [PromptOutcome.ABORT, PromptOutcome.ABORT, PromptOutcome.LENGTH]


def test_a_client_that_leaves_in_its_body_starts_nothing():
    with running() as (engine, server):
        client = socket.create_connection((server.host, server.port), timeout=20)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
        client.sendall(head + b"{")
        client.close()
        assert complete(server).status_code == 200
        assert len(engine.requests) == 1


@pytest.mark.parametrize("tokens_per_output", [1, 3, 50])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_engines_request(is_stream, tokens_per_output):
    """The answer would go on for ever: without an abort, this test ends at its deadline."""

    def script(_request: EngineRequest) -> ScriptedAnswer:
        text = "one €ND, two €ND" + "x" * 60_000
        return ScriptedAnswer(
            tuple(text.encode()), tokens_per_output=tokens_per_output, pause_after=150
        )

    with running(script) as (engine, server):
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
        response = complete(server, max_tokens=100_000, stop=["never", " €ND"], **options)
        assert engine.wait_until(lambda e: e.num_open == 0)
    if is_stream:
        *chunks, last = events_of(response)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        finish = chunks[-1]["choices"][0]["finish_reason"]
    else:
        last = response.json()
        text = last["choices"][0]["text"]
        finish = last["choices"][0]["finish_reason"]
    assert (text, finish) == ("one", "stop")
    length = len("one €ND".encode())
    assert last["usage"]["completion_tokens"] == -(-length // tokens_per_output) * tokens_per_output
    assert last["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_token_that_ends_an_answer_is_not_in_its_text(is_stream):
    model = ByteChatModel()
    model.eos_ids = frozenset(b"!")  # a token that has text
    with running(lambda _: ScriptedAnswer(tuple(b"Wow! Yes!")), model=model) as (_, server):
        response = complete(server, stream=is_stream)
    choices = [
        each["choices"][0] for each in (events_of(response) if is_stream else [response.json()])
    ]
    assert "".join(choice["text"] for choice in choices) == "Wow! Yes"
    assert choices[-1]["finish_reason"] == "stop"


def test_a_stop_string_that_is_not_completed_is_text():
    def script(_request: EngineRequest) -> ScriptedAnswer:
        return ScriptedAnswer(tuple(b"the EN"))

    with running(script) as (engine, server):
        assert complete(server, stop="END").json()["choices"][0]["text"] == "the EN"
        assert not engine.aborted


def test_a_full_queue_says_when_to_come_back():
    notes = Notes()
    limits = ServerLimits(open_prompts=2)
    with running(pausing, limits=limits, notes=notes) as (engine, server):
        client = connect(server, prompt=["one", "two"])
        assert engine.wait_until(lambda e: len(e.requests) == 2)
        refused = complete(server)
        client.close()
        assert engine.wait_until(lambda e: e.num_open == 0)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "engine_overloaded"
    assert PromptOutcome.REFUSED in notes.outcomes


def test_an_engine_that_refuses_one_prompt_gets_the_others_back():
    with running(pausing, capacity=1) as (engine, server):
        refused = complete(server, prompt=["one", "two"])
        assert refused.status_code == 429
        assert engine.wait_until(lambda e: e.num_open == 0)
        assert len(engine.aborted) == 1


class NeverEncodes(ByteChatModel):
    def encode(self, text: str) -> list[int]:
        raise AssertionError(f"{text!r} need not be tokenized")


def test_too_many_prompts_are_refused_for_good_before_they_are_tokenized():
    with running(model=NeverEncodes()) as (_, server):
        refused = complete(server, prompt=["x"] * 65)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


def test_a_loading_or_stopping_engine_is_unavailable():
    with running() as (engine, server):
        engine.is_ready = False
        refused = complete(server)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_not_ready")
        assert "retry-after" in refused.headers
        engine.is_ready = True
        assert complete(server).status_code == 200
        engine.stop()
        assert complete(server).status_code == 503


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_engine_that_stops_in_the_middle_says_so(is_stream):
    with running(pausing) as (engine, server):
        client = connect(server, stream=is_stream)
        assert engine.wait_until(lambda e: len(e.requests) == 1)
        engine.stop()
        received = b""
        while b"engine_not_ready" not in received:
            piece = client.recv(4096)
            assert piece
            received += piece
        client.close()
    assert (b" 503 " in received) != is_stream


def test_a_stuck_engine_does_not_hold_its_clients():
    with running(pausing, limits=ServerLimits(silence_seconds=0.05)) as (engine, server):
        engine.is_stuck = True
        response = complete(server)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_silent")
        assert engine.wait_until(lambda e: e.num_open == 0)


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_given_up():
    def script(_request: EngineRequest) -> ScriptedAnswer:
        return ScriptedAnswer((120,) * 200_000, tokens_per_output=100)

    limits = ServerLimits(send_seconds=0.1)
    with running(script, limits=limits) as (engine, server), socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((server.host, server.port))
        send_call(client, stream=True, max_tokens=200_000)
        assert engine.wait_until(lambda e: bool(e.requests) and e.num_open == 0)
        assert complete(server).status_code == 200


def test_a_server_that_stops_lets_answers_end():
    with running(pausing, grace_s=20) as (engine, server):
        client = connect(server, max_tokens=5)
        assert engine.wait_until(lambda e: len(e.requests) == 1)
        engine.resume()
        server.stop()
        assert b"never" in client.recv(65536)
        client.close()


@pytest.mark.slow
def test_a_server_that_stops_cuts_what_does_not_end(caplog):
    with running(pausing) as (engine, server):
        client = connect(server, stream=True)
        assert engine.wait_until(lambda e: len(e.requests) == 1)
        server.stop()
        assert engine.wait_until(lambda e: e.num_open == 0)
        assert len(engine.aborted) == 1
        client.close()
    assert not caplog.records, "an aborted client is not logged as a bug"


def test_what_is_measured():
    notes = Notes()

    def script(_request: EngineRequest) -> ScriptedAnswer:
        return ScriptedAnswer(tuple(b"four"), Counter({TierName.CPU: 2}))

    with running(script, notes=notes) as (_, server):
        assert complete(server).status_code == 200
        assert complete(server, prompt="").status_code == 400
    ((seconds, tiers),) = notes.first_tokens
    assert seconds > 0
    assert tiers[TierName.CPU] == 2
    assert len(notes.gaps) == 3
    assert all(gap >= 0 and source == tiers for gap, source in notes.gaps)
    assert notes.outcomes == [PromptOutcome.STOP, PromptOutcome.REFUSED]


def test_a_failure_is_counted():
    notes = Notes()
    with running(lambda _: ScriptedAnswer((1,), finish=FinishReason.ERROR), notes=notes) as (
        _,
        server,
    ):
        assert complete(server).status_code == 500
    assert notes.outcomes == [PromptOutcome.ERROR]
