"""Traces requests through engine, daemon and tiers with OpenTelemetry.

Theory
------
A request runs on many threads, which share only its id. So the spans of recent requests are kept by
id, and a step finds its parent there. The context goes to the daemon as W3C ``traceparent`` in the
call's metadata. A read of a tier serves all loads that wait for its blocks: it is found by their
hashes, and becomes a child of the load that requested them first.

vLLM traces its requests itself. Our steps there, and those of the daemon, are children of the
client's span. In vLLM's own processes, where we cannot trace, the context is only passed
on.

Rules
-----
* Off unless configured. While off, nothing is imported, and a step costs one check of ``is_on``.
* Spans contain numbers, ids and our own words: no prompts, tokens or salts.
* Spans that the collector does not accept are lost and counted: see ``span_export``.
"""

import atexit
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvtier.core.identity import BlockHash
from kvtier.errors import StartError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

__all__ = ["TRACES", "Metadata", "TraceStep", "Traces", "start_traces", "traceparent_of"]

_REQUESTS_MAX = 4096
"""The same as in the decision log: a store may come long after its request was answered."""

_TRACEPARENT = "traceparent"
_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Metadata = tuple[tuple[str, str], ...]
"""Metadata of a gRPC call."""


class TraceStep:
    """A step of a request in progress; without a span if it is not traced."""

    def __init__(self, span: "Span | None" = None) -> None:
        self.span = span

    def set(self, **facts: str | int | float) -> None:
        """Set attributes of the span."""
        if self.span is not None:
            self.span.set_attributes({f"kvtier.{name}": fact for name, fact in facts.items()})

    def context(self) -> "Context":
        """Return the context for child spans."""
        from opentelemetry.trace import set_span_in_context

        assert self.span is not None
        return set_span_in_context(self.span)


_NOT_TRACED = TraceStep()


class _Forwarded(threading.local):
    traceparent = ""


class Traces:
    """The tracing of one process. Thread-safe."""

    def __init__(self) -> None:
        self.is_on = False
        self._tracer: Tracer
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, TraceStep] = OrderedDict()
        self._loads: dict[BlockHash, list[TraceStep]] = {}
        """Loads that wait for a block, in order, by its hash."""
        self._forwarded = _Forwarded()

    def start(self, tracer: "Tracer") -> None:
        """Start tracing."""
        self._tracer, self.is_on = tracer, True

    def begin(self, request_id: str, traceparent: str = "") -> None:
        """Begin the span of a request, as a child of the client's span if there is one."""
        if not self.is_on:
            return
        from opentelemetry.trace import SpanKind

        parent = _extracted(((_TRACEPARENT, traceparent),))
        span = self._tracer.start_span("request", parent, SpanKind.SERVER)
        step = TraceStep(span)
        step.set(request=request_id)
        with self._lock:
            self._requests[request_id] = step
            if len(self._requests) > _REQUESTS_MAX:
                self._requests.popitem(last=False)

    def end(self, request_id: str, **facts: str | int | float) -> None:
        """End a request's span; later steps can still become its children."""
        step = self._of(request_id)
        if step.span is not None and step.span.is_recording():
            step.set(**facts)
            step.span.end()

    def record(self, name: str, request_id: str, took_s: float) -> None:
        """Record a step of a request that has just ended."""
        step = self._of(request_id)
        if step.span is not None:
            began_ns = time.time_ns() - int(took_s * 1e9)
            self._tracer.start_span(name, step.context(), start_time=began_ns).end()

    @contextmanager
    def step(self, name: str, request_id: str, **facts: str | int | float) -> Iterator[TraceStep]:
        """Trace a step on this thread; calls within it carry its context."""
        parent = self._of(request_id)
        if parent.span is None:
            yield _NOT_TRACED
            return
        with self._current(name, parent.context()) as step:
            step.set(**facts)
            yield step

    @contextmanager
    def forward(self, name: str, traceparent: str) -> Iterator[TraceStep]:
        """Trace a step of a request that another program traces.

        Calls within it carry the step's context, or ``traceparent`` if this process does not trace.
        """
        if self.is_on and traceparent:
            with self._current(name, _extracted(((_TRACEPARENT, traceparent),))) as step:
                yield step
            return
        self._forwarded.traceparent = traceparent
        try:
            yield _NOT_TRACED
        finally:
            self._forwarded.traceparent = ""

    def metadata(self) -> Metadata | None:
        """Return the metadata for a call in this thread's step."""
        if not self.is_on:
            passed = self._forwarded.traceparent
            return ((_TRACEPARENT, passed),) if passed else None
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        return tuple(carrier.items())

    @contextmanager
    def serve(
        self, name: str, metadata: "Iterable[tuple[str, str | bytes]] | None"
    ) -> Iterator[TraceStep]:
        """Trace the handling of a call if its caller traces it; also for coroutines."""
        parent = _extracted(metadata or ()) if self.is_on else None
        if not parent:
            yield _NOT_TRACED
            return
        from opentelemetry.trace import SpanKind

        step = TraceStep(self._tracer.start_span(name, parent, SpanKind.SERVER))
        try:
            yield step
        finally:
            assert step.span is not None
            step.span.end()

    @contextmanager
    def waiting(self, step: TraceStep, hashes: Sequence[BlockHash]) -> Iterator[None]:
        """Make reads of these blocks children of ``step`` within the context."""
        if step.span is None:
            yield
            return
        with self._lock:
            for each in hashes:
                self._loads.setdefault(each, []).append(step)
        try:
            yield
        finally:
            with self._lock:
                for each in hashes:
                    self._loads[each].remove(step)
                    if not self._loads[each]:
                        del self._loads[each]

    @contextmanager
    def read(self, tier: str, num_blocks: int, hashes: Iterable[BlockHash]) -> Iterator[None]:
        """Trace a read of a tier if a traced load waits for it."""
        step = self._waiting_load(hashes) if self._loads else None
        if step is None:
            yield
            return
        reading = TraceStep(self._tracer.start_span("tier read", step.context()))
        reading.set(tier=tier, blocks=num_blocks)
        try:
            yield
        finally:
            assert reading.span is not None
            reading.span.end()

    @contextmanager
    def _current(self, name: str, parent: "Context") -> Iterator[TraceStep]:
        """Trace a step as this thread's current span."""
        from opentelemetry.trace import use_span

        step = TraceStep(self._tracer.start_span(name, parent))
        assert step.span is not None
        with use_span(step.span, end_on_exit=True, record_exception=False):
            yield step

    def _of(self, request_id: str) -> TraceStep:
        return self._requests.get(request_id, _NOT_TRACED) if self.is_on else _NOT_TRACED

    def _waiting_load(self, hashes: Iterable[BlockHash]) -> TraceStep | None:
        with self._lock:
            found = (self._loads.get(each) for each in hashes)
            return next((marks[0] for marks in found if marks), None)


def traceparent_of(headers: Mapping[str, str] | None) -> str:
    """Return the trace context in a request's headers, or "" if it is missing or malformed."""
    found = (headers or {}).get(_TRACEPARENT, "")
    return found if _FORM.fullmatch(found) else ""


def _extracted(metadata: "Iterable[tuple[str, str | bytes]]") -> "Context":
    """Return the trace context in a call's metadata; empty if it is missing or malformed."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: text for name, text in metadata if isinstance(text, str)}
    return TraceContextTextMapPropagator().extract(carrier, Context())


TRACES = Traces()
"""The tracing of this process."""


def start_traces(service: str) -> None:
    """Start tracing as ``service``. Raises StartError if OpenTelemetry is not installed."""
    try:
        from kvtier.observe.span_export import open_tracer
    except ImportError as error:
        raise StartError(
            "daemon.traces",
            f"OpenTelemetry is not installed: {error}",
            "pip install 'kvtier[otel]'",
        ) from error
    tracer, queue = open_tracer(service)
    TRACES.start(tracer)
    atexit.register(queue.force_flush)
