"""A collector of OpenTelemetry's traces on the loopback interface, by HTTP or gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
"""What a client sends that traces its request."""


class Collector:
    """Listens within ``by_http`` or ``by_grpc``, and keeps what it gets."""

    def __init__(self) -> None:
        self.url = ""
        self.environment: dict[str, str] = {}
        """For whoever is to send to it."""
        self._lock = threading.Lock()
        self._requests: list[ExportTraceServiceRequest] = []

    @contextmanager
    def by_http(self) -> Iterator[Self]:
        """Be there on a port of its own."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _receiver(self))
        self._listens(server.server_port, "http/protobuf")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join(30)

    @contextmanager
    def by_grpc(self) -> Iterator[Self]:
        """Be there on a port of its own."""
        collector = self

        class Service(TraceServiceServicer):  # type: ignore[misc]  # generated without types
            def Export(self, request: Any, _context: Any) -> Any:
                collector.take(request)
                return ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(Service(), server)
        self._listens(server.add_insecure_port("127.0.0.1:0"), "grpc")
        server.start()
        try:
            yield self
        finally:
            server.stop(0).wait(10)

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep what was sent."""
        with self._lock:
            self._requests.append(request)

    def received(self) -> bytes:
        """Return all that was sent so far."""
        with self._lock:
            return b"".join(request.SerializeToString() for request in self._requests)

    def spans(self, trace: str = TRACE) -> dict[str, list[Any]]:
        """Return the spans of a trace so far, by name."""
        with self._lock:
            requests = list(self._requests)
        spans: dict[str, list[Any]] = {}
        for request in requests:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        if span.trace_id.hex() == trace:
                            spans.setdefault(span.name, []).append(span)
        return spans

    def _listens(self, port: int, protocol: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_TRACES_SAMPLER": "",
        }


def _receiver(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    return Receiver


def facts(span: Any) -> dict[str, Any]:
    """Return the attributes of a span."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }
