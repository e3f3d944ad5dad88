"""Traces of a real daemon and engine, as a collector gets them."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.served import Served, complete, url_of

pytestmark = pytest.mark.slow

SECRET = "the-patient-is-called-Ottokar-"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """An OTLP collector on the loopback interface."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector._lock:
                    collector._bodies.append(body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def listening(self) -> Iterator["Collector"]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join(10)

    def received(self) -> bytes:
        with self._lock:
            return b"".join(self._bodies)

    def spans(self, trace: str = TRACE) -> dict[str, list[Any]]:
        """Return the spans of a trace so far, by name."""
        with self._lock:
            requests = [ExportTraceServiceRequest.FromString(body) for body in self._bodies]
        spans: dict[str, list[Any]] = {}
        for request in requests:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        if span.trace_id.hex() == trace:
                            spans.setdefault(span.name, []).append(span)
        return spans


def facts(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def ask(url: str, prompt: str) -> Any:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    with closing(connection):
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == http.HTTPStatus.OK, content
    return json.loads(content)


TREE = {
    "lookup": "request",
    "load": "request",
    "first token": "request",
    "decision": "lookup",
    "restore": "load",
    "tier read": "restore",
}


def test_a_request_is_one_trace_from_its_client_to_the_disk(tiny_folder: Path) -> None:
    prompt = SECRET * 12
    with work_directory() as directory, Collector().listening() as collector:
        settings = {"daemon.traces": "true", "daemon.log_level": "debug"}
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_TRACES_SAMPLER": ""}
        node = Served(directory, settings, environment)
        with (
            node.start("serve") as daemon,
            node.start("engine", "--model", str(tiny_folder)) as engine,
        ):
            url = url_of(engine)
            await_true(lambda: node.stat()["engines"], "the engine is attached")
            complete(url, prompt, 4)
            await_true(lambda: node.stat()["tiers"]["ssd"]["blocks"] >= 5, "it is on the disk")
            node.await_idle()
            node.drop("gpu", "cpu")
            answer = ask(url, prompt)
            assert answer["kvtier"]["tier_tokens"]["ssd"], "it came from the disk"
            spans = await_true(
                lambda: (found := collector.spans()).keys() >= {"request", *TREE} and found,
                "every span has come",
                20,
            )
            told = node.explain(f"{answer['id']}-0")
            assert engine.stop() == 0
            assert daemon.stop() == 0
            logs = daemon.log + engine.log
    (request,) = spans["request"]
    assert request.parent_span_id.hex() == PARENT
    assert facts(request)["kvtier.request"] == f"{answer['id']}-0"
    for name, parent in TREE.items():
        (above,) = spans[parent]
        for span in spans[name]:
            assert span.parent_span_id == above.span_id, name
            assert span.start_time_unix_nano <= span.end_time_unix_nano
    decided, (load,) = facts(spans["decision"][0]), spans["load"]
    assert decided["kvtier.decision"] == told["decision"]["number"]
    assert decided["kvtier.planned_blocks"] == facts(load)["kvtier.loaded_blocks"]
    assert facts(load)["kvtier.decision"] == told["decision"]["number"]
    assert decided["kvtier.found"].startswith("ssd:")
    assert {facts(span)["kvtier.tier"] for span in spans["tier read"]} == {"ssd"}
    assert b"Ottokar" not in collector.received()
    assert "spans were lost" not in logs
    assert b"store" in collector.received(), "of the first one, in a trace of its own"
    assert b"admission" in collector.received()
