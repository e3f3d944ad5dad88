"""Traces of requests through engine, daemon and tiers, for those who collect them by OpenTelemetry.

Theory
------
A request goes over many threads, and what they all have is its id. So the spans of the last
requests are kept by id, and a step of one finds its parent there. To the daemon the context goes as
W3C ``traceparent`` in the call's metadata. A read of a tier serves whichever load waits for its
blocks: it is found by their hashes, and hangs under the load that asked first.

vLLM traces its requests itself. There our steps, and the daemon's, hang under the request's client;
where vLLM lets us trace nothing in its processes, only that context is passed on.

Rules
-----
* Off unless configured: then nothing is imported, and a step costs a look at ``is_on``.
* Spans carry numbers, ids and words of ours: no prompt, no token, no salt.
* Spans that the collector does not accept are lost and counted. Nothing waits for it.
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
"""As many as are remembered for ``explain``: a store may come long after its request's answer."""

_TRACEPARENT = "traceparent"
_FORM = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

Metadata = tuple[tuple[str, str], ...]
"""What a call takes along beside its message."""


class TraceStep:
    """A step of a request that is under way, or none where nothing is traced."""

    def __init__(self, span: "Span | None" = None) -> None:
        self.span = span

    def tell(self, **facts: str | int | float) -> None:
        """Note what is known of it now."""
        if self.span is not None:
            self.span.set_attributes({f"kvtier.{name}": fact for name, fact in facts.items()})

    def context(self) -> "Context":
        """Return it as the parent of other steps."""
        from opentelemetry.trace import set_span_in_context

        assert self.span is not None
        return set_span_in_context(self.span)


_NOTHING = TraceStep()


class _Passed(threading.local):
    traceparent = ""


class Traces:
    """What a process traces; one for all of it, as there is one log. From any thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._tracer: Tracer
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, TraceStep] = OrderedDict()
        self._loads: dict[BlockHash, list[TraceStep]] = {}
        """By block, the loads that wait for it, the first one first."""
        self._passed = _Passed()

    def start(self, tracer: "Tracer") -> None:
        """Trace from now on."""
        self._tracer, self.is_on = tracer, True

    def begin(self, request_id: str, traceparent: str = "") -> None:
        """Begin a request's own span, within whatever its client traces."""
        if not self.is_on:
            return
        from opentelemetry.trace import SpanKind

        parent = _extracted(((_TRACEPARENT, traceparent),))
        span = self._tracer.start_span("request", parent, SpanKind.SERVER)
        mark = TraceStep(span)
        mark.tell(request=request_id)
        with self._lock:
            self._requests[request_id] = mark
            if len(self._requests) > _REQUESTS_MAX:
                self._requests.popitem(last=False)

    def end(self, request_id: str, **facts: str | int | float) -> None:
        """End a request's span; steps that come later still find it."""
        mark = self._of(request_id)
        if mark.span is not None and mark.span.is_recording():
            mark.tell(**facts)
            mark.span.end()

    def note(self, name: str, request_id: str, took_s: float) -> None:
        """Note a step of a request that has just ended."""
        mark = self._of(request_id)
        if mark.span is not None:
            began_ns = time.time_ns() - int(took_s * 1e9)
            self._tracer.start_span(name, mark.context(), start_time=began_ns).end()

    @contextmanager
    def step(self, name: str, request_id: str, **facts: str | int | float) -> Iterator[TraceStep]:
        """Trace a step of a request that this thread does; calls in it carry its context."""
        parent = self._of(request_id)
        if parent.span is None:
            yield _NOTHING
            return
        with self._doing(name, parent.context()) as mark:
            mark.tell(**facts)
            yield mark

    @contextmanager
    def passing_on(self, name: str, traceparent: str) -> Iterator[TraceStep]:
        """Trace a step of a request that others trace, and of which ``traceparent_of`` tells.

        Calls in it carry the step's context; where nothing is traced here, that of the request.
        """
        if self.is_on and traceparent:
            with self._doing(name, _extracted(((_TRACEPARENT, traceparent),))) as mark:
                yield mark
            return
        self._passed.traceparent = traceparent
        try:
            yield _NOTHING
        finally:
            self._passed.traceparent = ""

    def metadata(self) -> Metadata | None:
        """Return what a call takes along from the step that this thread does."""
        if not self.is_on:
            passed = self._passed.traceparent
            return ((_TRACEPARENT, passed),) if passed else None
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier)
        return tuple(carrier.items())

    @contextmanager
    def serve(
        self, name: str, metadata: "Iterable[tuple[str, str | bytes]] | None"
    ) -> Iterator[TraceStep]:
        """Trace what is done for a caller, if he traces it; on a loop as well."""
        parent = _extracted(metadata or ()) if self.is_on else None
        if not parent:
            yield _NOTHING
            return
        from opentelemetry.trace import SpanKind

        mark = TraceStep(self._tracer.start_span(name, parent, SpanKind.SERVER))
        try:
            yield mark
        finally:
            assert mark.span is not None
            mark.span.end()

    @contextmanager
    def waiting(self, mark: TraceStep, hashes: Sequence[BlockHash]) -> Iterator[None]:
        """Have reads of these blocks hang under ``mark`` within the context."""
        if mark.span is None:
            yield
            return
        with self._lock:
            for each in hashes:
                self._loads.setdefault(each, []).append(mark)
        try:
            yield
        finally:
            with self._lock:
                for each in hashes:
                    self._loads[each].remove(mark)
                    if not self._loads[each]:
                        del self._loads[each]

    @contextmanager
    def read(self, tier: str, num_blocks: int, hashes: Iterable[BlockHash]) -> Iterator[None]:
        """Trace a read of a tier, if a traced load waits for it."""
        mark = self._waits_for(hashes) if self._loads else None
        if mark is None:
            yield
            return
        reading = TraceStep(self._tracer.start_span("tier read", mark.context()))
        reading.tell(tier=tier, blocks=num_blocks)
        try:
            yield
        finally:
            assert reading.span is not None
            reading.span.end()

    @contextmanager
    def _doing(self, name: str, parent: "Context") -> Iterator[TraceStep]:
        """Trace what this thread does within."""
        from opentelemetry.trace import use_span

        mark = TraceStep(self._tracer.start_span(name, parent))
        assert mark.span is not None
        with use_span(mark.span, end_on_exit=True, record_exception=False):
            yield mark

    def _of(self, request_id: str) -> TraceStep:
        return self._requests.get(request_id, _NOTHING) if self.is_on else _NOTHING

    def _waits_for(self, hashes: Iterable[BlockHash]) -> TraceStep | None:
        with self._lock:
            found = (self._loads.get(each) for each in hashes)
            return next((marks[0] for marks in found if marks), None)


def traceparent_of(headers: Mapping[str, str] | None) -> str:
    """Return the context that a request's headers give, empty where there is none.

    Also where it has another form: not every text can go along with a call.
    """
    found = (headers or {}).get(_TRACEPARENT, "")
    return found if _FORM.fullmatch(found) else ""


def _extracted(metadata: "Iterable[tuple[str, str | bytes]]") -> "Context":
    """Return the context that a caller gave, empty where there is none that makes sense."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: text for name, text in metadata if isinstance(text, str)}
    return TraceContextTextMapPropagator().extract(carrier, Context())


TRACES = Traces()
"""This process's; started, if at all, where the process starts."""


def start_traces(service: str) -> None:
    """Trace what this process does, under that name. Raises StartError without the extra."""
    try:
        from kvtier.observe.span_export import open_tracer
    except ImportError as error:
        raise StartError(
            "daemon.traces", f"OpenTelemetry is not here: {error}", "pip install 'kvtier[otel]'"
        ) from error
    tracer, outlet = open_tracer(service)
    TRACES.start(tracer)
    atexit.register(outlet.force_flush)
