"""Traces of a real daemon and engine, as a collector gets them."""

import http.client
import json
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode, complete, url_of
from tests.integration.collector import PARENT, TRACEPARENT, Collector, facts

pytestmark = pytest.mark.slow

SECRET = "the-patient-is-called-Ottokar-"
HEADERS = {"Content-Type": "application/json", "traceparent": TRACEPARENT}


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
    with work_directory() as directory, Collector().by_http() as collector:
        settings = {"daemon.traces": "true", "daemon.log_level": "debug"}
        node = RunningNode(directory, settings, collector.environment)
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
    assert "spans lost" not in logs
    assert b"store" in collector.received(), "of the first one, in a trace of its own"
    assert b"admission" in collector.received()
