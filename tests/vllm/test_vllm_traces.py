"""A request of vLLM's that is traced: what the daemon does for it is part of its client's trace."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.collector import PARENT, TRACEPARENT, Collector, facts
from tests.vllm.small_vllm import SmallVllm

pytestmark = pytest.mark.slow

TOKENS = list(range(1000, 1300))
BLOCKS = list(range(1, 20))
OTHERS = list(range(21, 40))
TRACED = {"traceparent": TRACEPARENT}

OWN = {"decision": 2, "restore": 2, "admission": 1}
"""Spans under the client's own: of two lookups, a hold and a copy, and a store."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().by_grpc() as collector:
        yield collector


def test_what_the_daemon_does_for_a_request_is_in_its_clients_trace(collector: Collector) -> None:
    with work_directory() as directory:
        node = RunningNode(directory, {"daemon.traces": "true"}, collector.environment)
        with node.daemon() as daemon, SmallVllm(node.socket) as small:
            small.prefill(TOKENS, BLOCKS, trace_headers=TRACED)
            node.await_idle()
            node.drop("cpu")
            assert small.prefill(TOKENS, OTHERS, trace_headers=TRACED) == (256, set())

            def arrived() -> dict[str, list[Any]] | None:
                spans = collector.spans()
                counts = {name: len(spans.get(name, ())) for name in OWN}
                return spans if counts == OWN and spans.get("tier read") else None

            spans = await_true(arrived, "every span has come", 20)
            assert daemon.stop() == 0
        assert "spans lost" not in daemon.log
    for name in OWN:
        assert {span.parent_span_id.hex() for span in spans[name]} == {PARENT}, name
    held, _ = sorted(spans["restore"], key=lambda span: span.start_time_unix_nano)
    assert {span.parent_span_id for span in spans["tier read"]} == {held.span_id}
    found = [facts(span)["kvtier.found"] for span in spans["decision"]]
    assert max(found).startswith("ssd:")
    decided = {facts(span)["kvtier.decision"] for span in spans["decision"]}
    assert {facts(span)["kvtier.decision"] for span in spans["restore"]} <= decided


def test_what_is_no_trace_is_passed_on_to_nobody() -> None:
    no_traces = [
        None,
        {},
        {"traceparent": "\N{SNOWMAN}\r\n\0"},
        {"traceparent": TRACEPARENT * 1000},
    ]
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon(), SmallVllm(node.socket) as small:
            sessions = [client.session for client in small.clients]
            for headers in no_traces:
                small.prefill(TOKENS, BLOCKS, trace_headers=headers)
            assert small.prefill(TOKENS, OTHERS) == (256, set())
            assert [client.session for client in small.clients] == sessions
