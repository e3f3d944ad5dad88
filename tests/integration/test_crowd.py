"""Hundreds of tenants, with words of their own: no metric, no table grows with them."""

from collections.abc import Iterator

import pytest

from kvtier.core.identity import tenant_digest
from kvtier.core.request import RequestTraits
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode, fetch
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

NUM_TENANTS = 300


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        settings = {"policy.eviction": "rd-sec", "ssd.write": "demote", "cost.restore": "auto"}
        node = RunningNode(directory, settings)
        with node.daemon():
            yield node


def series(node: RunningNode) -> set[str]:
    """Return the names and labels of everything that is measured."""
    lines = fetch(f"http://127.0.0.1:{node.http_port}/metrics").decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def test_tenants_and_kinds_are_no_labels(node: RunningNode) -> None:
    with PatternEngine(node.socket) as engine:
        engine.ask(0)
        before = series(node)
        for number in range(NUM_TENANTS):
            engine.tenant = tenant_digest(f"tenant {number}")
            traits = RequestTraits(request_id=f"request-{number}", kind=f"kind-{number}")
            assert engine.ask(number, traits=traits).tiers == ()
            assert engine.store(number, traits=traits) == 4
        for number in range(0, NUM_TENANTS, 10):
            engine.tenant = tenant_digest(f"tenant {number}")
            assert len(engine.ask(number).tiers) == 4, "each finds its own"
            assert engine.ask(number + 1).tiers == (), "and nobody else's"
        status = node.await_idle()
        assert series(node) == before
        assert status["tiers"]["cpu"]["blocks"] == 4 * NUM_TENANTS
        assert len(status["policy"]["classes"]) <= 64, "kinds are words of clients, without end"
