"""Exports trace spans to a collector, from a thread of its own.

Ending a span never blocks: ended spans wait in a bounded queue. A collector that is down, slow or
full loses spans; they are counted, and the loss is logged at a limited rate.
"""

import logging
import os
import threading
from collections import deque

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from kvtier.observe.log import Log, RateLimitedLog

__all__ = ["SpanQueue", "open_tracer"]

_SPANS_MAX = 2048
"""The same as the SDK's queue: a few hundred requests, and a few MB."""

_BATCH_MAX = 512
_PERIOD_S = 1.0
"""Time between exports; people who look at traces can wait for a second."""


def open_tracer(service: str) -> tuple[Tracer, "SpanQueue"]:
    """Return a tracer and its queue, configured by the ``OTEL_*`` variables."""
    # The exporter would log every attempt; the queue counts lost spans.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    queue = SpanQueue(_exporter())
    provider.add_span_processor(queue)
    return provider.get_tracer("kvtier"), queue


def _exporter() -> SpanExporter:
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GrpcSpanExporter,
        )

        return GrpcSpanExporter()
    return OTLPSpanExporter()


class SpanQueue(SpanProcessor):
    """Sends ended spans with ``exporter``, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._spans: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._is_sending = self._is_flushing = False
        self.num_sent = self.num_lost = 0
        self._warnings = RateLimitedLog(Log("kvtier.trace"))
        threading.Thread(target=self._run, name="kvtier-spans", daemon=True).start()

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span; never blocks."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        with self._changed:
            if len(self._spans) < _SPANS_MAX:
                self._spans.append(span)
                if len(self._spans) == _BATCH_MAX:
                    self._changed.notify_all()
                return
            self.num_lost += 1
        self._warnings.warning("spans lost", lost=self.num_lost, why="the queue is full")

    def force_flush(self, timeout_millis: int = 1000) -> bool:
        """Send all waiting spans; returns False if that takes longer."""
        with self._changed:
            self._is_flushing = True
            self._changed.notify_all()
            return self._changed.wait_for(self._is_empty, timeout_millis / 1000)

    def _is_empty(self) -> bool:
        return not (self._spans or self._is_sending)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
                if not self._is_flushing and len(self._spans) < _BATCH_MAX:
                    self._changed.wait(_PERIOD_S)
                batch = [self._spans.popleft() for _ in range(min(_BATCH_MAX, len(self._spans)))]
                self._is_sending = bool(batch)
                self._is_flushing = self._is_flushing and bool(self._spans)
            if batch:
                self._send(batch)

    def _send(self, batch: list[ReadableSpan]) -> None:
        why = "the collector refused them"
        try:
            is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # exporters may raise anything
            is_taken, why = False, repr(error)
        with self._changed:
            if is_taken:
                self.num_sent += len(batch)
                return
            self.num_lost += len(batch)
        self._warnings.warning("spans lost", lost=self.num_lost, why=why)
