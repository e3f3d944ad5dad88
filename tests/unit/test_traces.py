"""Traces: whose step hangs under which, nothing where nothing is traced, and nobody waits."""

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtier.core.identity import BlockHash
from kvtier.observe.span_export import SpanQueue
from kvtier.observe.trace import Metadata, Traces, traceparent_of
from kvtier.testing.child import await_true

WAIT_S = 30.0
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
A, B, C = (BlockHash(bytes([number]) * 16) for number in range(3))


class Traced:
    """Traces of this process, and what came of them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces()
        self.traces.start(self._provider.get_tracer("test"))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def close(self) -> None:
        self._provider.shutdown()


@pytest.fixture
def traced() -> Iterator[Traced]:
    traced = Traced()
    yield traced
    traced.close()


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def test_a_request_is_one_trace_within_its_clients(traced: Traced) -> None:
    engine, daemon = traced.traces, traced.traces
    engine.begin("r", CLIENT)
    with engine.step("lookup", "r"):
        carried = engine.metadata()
    with daemon.serve("decision", carried) as mark:
        mark.set(decision=7)
    engine.record("first token", "r", 0.5)
    engine.end("r", prompt_tokens=3)
    with engine.step("store", "r"):
        pass  # later than the end
    spans = traced.spans()
    request = spans["request"]
    assert request.context.trace_id == int(CLIENT.split("-")[1], 16)
    assert parent_of(request) == int(CLIENT.split("-")[2], 16)
    for name in ("lookup", "first token", "store"):
        assert parent_of(spans[name]) == request.context.span_id
    assert parent_of(spans["decision"]) == spans["lookup"].context.span_id
    assert {span.context.trace_id for span in spans.values()} == {request.context.trace_id}
    assert spans["decision"].attributes == {"kvtier.decision": 7}
    assert request.attributes == {"kvtier.request": "r", "kvtier.prompt_tokens": 3}
    first = spans["first token"]
    assert first.end_time - first.start_time == pytest.approx(0.5e9, rel=0.5)


@pytest.mark.parametrize("wrong", ["", "x", "00-0-0-01", "\x00", CLIENT * 1000])
def test_what_a_client_sends_wrongly_begins_a_trace_of_its_own(traced: Traced, wrong: str) -> None:
    traced.traces.begin("r", wrong)
    traced.traces.end("r")
    assert traced.spans()["request"].parent is None


def test_what_the_client_does_not_sample_is_not_traced(traced: Traced) -> None:
    traced.traces.begin("r", UNSAMPLED)
    with traced.traces.step("lookup", "r"):
        carried = traced.traces.metadata()
    with traced.traces.serve("decision", carried):
        pass
    traced.traces.end("r")
    assert not traced.spans()


def test_a_call_of_somebody_who_traces_nothing_is_not_traced(traced: Traced) -> None:
    with traced.traces.serve("decision", (("user-agent", "grpc"),)) as mark:
        mark.set(decision=1)
        with traced.traces.waiting(mark, [A]), traced.traces.read("ssd", 1, [A]):
            pass
    with traced.traces.step("lookup", "nobody"):
        pass
    traced.traces.end("nobody")
    assert not traced.spans()


def test_a_read_hangs_under_the_load_that_asked_first(traced: Traced) -> None:
    traces = traced.traces
    carried = (("traceparent", CLIENT),)
    with traces.serve("first", carried) as first, traces.serve("second", carried) as second:
        with (
            traces.waiting(first, [A, B]),
            traces.waiting(second, [B, C]),
            traces.read("ssd", 2, [B, C]),
        ):
            pass
        with traces.read("remote", 1, [A]):
            pass  # in the background: nobody waits
    spans = traced.spans()
    assert parent_of(spans["tier read"]) == spans["first"].context.span_id
    assert spans["tier read"].attributes == {"kvtier.tier": "ssd", "kvtier.blocks": 2}


@pytest.mark.parametrize(
    "wrong",
    ["", "x", "00-0-0-01", "\x00", CLIENT * 1000, CLIENT.upper(), f"{CLIENT}\n", f" {CLIENT}"],
)
def test_only_what_has_the_form_is_passed_on(wrong: str) -> None:
    assert traceparent_of({"traceparent": wrong}) == ""
    assert traceparent_of({"traceparent": CLIENT, "tracestate": "x=1"}) == CLIENT
    assert traceparent_of(None) == traceparent_of({"tracestate": "x=1"}) == ""


def test_what_others_trace_is_passed_on_by_the_thread_that_does_it() -> None:
    traces = Traces()
    seen: list[Metadata | None] = []
    with traces.forward("lookup", CLIENT) as mark:
        mark.set(found_blocks=1)
        other = threading.Thread(target=lambda: seen.append(traces.metadata()))
        other.start()
        other.join(WAIT_S)
        assert traces.metadata() == (("traceparent", CLIENT),)
    assert traces.metadata() is None
    with traces.forward("lookup", ""):
        assert traces.metadata() is None
    assert seen == [None]


def test_a_step_of_what_others_trace_hangs_under_it_where_we_trace_as_well(traced: Traced) -> None:
    with traced.traces.forward("lookup", CLIENT) as mark:
        mark.set(found_blocks=3)
        with traced.traces.serve("decision", traced.traces.metadata()):
            pass
    for nobodys in ("", UNSAMPLED):
        with traced.traces.forward("load", nobodys):
            assert traced.traces.metadata() is not None
    spans = traced.spans()
    assert spans.keys() == {"lookup", "decision"}
    assert f"{parent_of(spans['lookup']):016x}" == CLIENT.split("-")[2]
    assert spans["lookup"].attributes == {"kvtier.found_blocks": 3}
    lookup = spans["lookup"].context
    assert lookup is not None
    assert parent_of(spans["decision"]) == lookup.span_id


@pytest.mark.slow
def test_where_nothing_is_traced_nothing_is_imported_or_kept() -> None:
    program = """
import sys
from kvtier.observe.trace import TRACES
import kvtier.cli.serve, kvtier.daemon.daemon, kvtier.client.client
TRACES.begin("r", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
with TRACES.step("lookup", "r") as mark:
    mark.set(decision=1)
    assert TRACES.metadata() is None
with TRACES.serve("decision", ()) as mark, TRACES.waiting(mark, [b"x"]):
    with TRACES.read("ssd", 1, [b"x"]):
        TRACES.record("first token", "r", 1.0)
TRACES.end("r")
with TRACES.forward("lookup", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
    assert TRACES.metadata()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.modules["opentelemetry"] = None
from kvtier.errors import StartError
from kvtier.observe.trace import start_traces
try:
    start_traces("kvtier")
except StartError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "daemon.traces" in ended.stdout
    assert "pip install 'kvtier[otel]'" in ended.stdout


class Collector(SpanExporter):
    """Takes spans as it is told to: ``answers`` are results or faults, one a batch."""

    def __init__(self, *answers: SpanExportResult | Exception) -> None:
        self._answers = iter(answers)
        self.num_taken = 0
        self.is_asked, self.goes_on = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_asked.set()
        assert self.goes_on.wait(WAIT_S)
        answer = next(self._answers, SpanExportResult.SUCCESS)
        if isinstance(answer, Exception):
            raise answer
        self.num_taken += len(spans) if answer is SpanExportResult.SUCCESS else 0
        return answer


def end_spans(outlet: SpanQueue, number: int) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(outlet)
    tracer = provider.get_tracer("test")
    for _ in range(number):
        tracer.start_span("x").end()


def test_nobody_waits_for_a_collector_that_stands_still() -> None:
    collector = Collector()
    outlet = SpanQueue(collector)
    end_spans(outlet, 1000)
    assert collector.is_asked.wait(WAIT_S)
    end_spans(outlet, 9000)
    assert not outlet.force_flush(1)
    assert outlet.num_lost > 5000
    collector.goes_on.set()
    assert outlet.force_flush(10_000)
    assert outlet.num_sent == collector.num_taken
    assert outlet.num_sent + outlet.num_lost == 10_000


@pytest.mark.slow
@pytest.mark.parametrize("answer", [SpanExportResult.FAILURE, OSError("away"), KeyError("a bug")])
def test_what_a_collector_does_not_take_is_counted(answer: SpanExportResult | Exception) -> None:
    collector = Collector(answer)
    collector.goes_on.set()
    outlet = SpanQueue(collector)
    end_spans(outlet, 10)
    assert outlet.force_flush(10_000)
    assert (outlet.num_sent, outlet.num_lost) == (0, 10)
    end_spans(outlet, 5)
    await_true(lambda: outlet.num_sent == 5, "it goes on by itself")
