"""A real vLLM that traces its requests, and a daemon that does: one trace."""

import http.client
import json
from collections.abc import Callable, Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.integration.collector import PARENT, TRACEPARENT, Collector
from tests.vllm.servers import RELEASES, STARTED, await_joined, await_stored, prompt

pytestmark = STARTED


VLLMS = {"llm_request", "lookup", "hold", "load", "store"}
DAEMONS = {"decision": {"lookup"}, "restore": {"hold", "load"}, "admission": {"store"}}
"""Spans, and the connector's steps that they hang under."""


def is_whole(spans: Mapping[str, Any]) -> bool:
    """Tell whether the spans of all three processes have come, each with the one it hangs under."""
    if not spans.keys() >= VLLMS | DAEMONS.keys():
        return False
    return all(
        span.parent_span_id in {step.span_id for name in steps for step in spans[name]}
        for each, steps in DAEMONS.items()
        for span in spans[each]
    )


def ask(vllm: VllmServer, tokens: list[int]) -> None:
    body = {"model": "m", "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "traceparent": TRACEPARENT}
    with closing(http.client.HTTPConnection(vllm.url, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.status == HTTPStatus.OK, reply.read()
        reply.read()


@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
def test_vllms_span_and_the_daemons_are_of_one_trace(start: Callable[..., VllmServer]) -> None:
    with work_directory() as directory, Collector().by_grpc() as collector:
        settings = {"daemon.traces": "true", "cpu.capacity": "96MiB", "cpu.slab": "8MiB"}
        node = RunningNode(directory, settings, collector.environment)
        with (
            node.daemon() as daemon,
            start(RELEASES[0], "tiny", directory, otlp_traces_endpoint=collector.url) as vllm,
        ):
            vllm.await_ready()
            await_joined(node)
            ask(vllm, prompt(1))
            await_stored(node, 4, "cpu")
            vllm.forget()
            ask(vllm, prompt(1))
            spans = await_true(
                lambda: is_whole(found := collector.spans()) and found, "every span has come", 60
            )
            assert "Traceback" not in vllm.child.log
            assert daemon.stop() == 0
    for name in VLLMS:
        assert {span.parent_span_id.hex() for span in spans[name]} == {PARENT}, name
