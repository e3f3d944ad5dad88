"""A client in a process that may start no more threads, against a real daemon."""

import threading

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine, num_arenas

pytestmark = pytest.mark.slow


def test_grpc_needs_no_thread_of_its_own_for_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it could not start left streams that nobody read, and a channel without an end."""
    start = threading.Thread.start

    def start_ours(thread: threading.Thread) -> None:
        if thread.name.endswith("(_run)"):  # what gRPC starts for calls that it is to wait for
            raise RuntimeError("can't start new thread")
        start(thread)

    num_before = num_arenas()  # other tests ran in this process
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon():
            with monkeypatch.context() as full:
                full.setattr(threading.Thread, "start", start_ours)
                with PatternEngine(node.socket) as engine:
                    session = engine.client.session
                    assert engine.store(1) == 4
                    assert engine.load(1) == (["cpu"] * 4, "complete")
                    held = engine.client.hold(engine.tenant, engine.chain(1, 4), 0)
                    assert len(held.tiers) == 4
                    held.release()
                    assert engine.client.session == session, "it is the first one still"
            await_true(lambda: not node.stat()["engines"], "it has let go of its session")
    await_true(lambda: num_arenas() == num_before, "the arena is unmapped")
