"""The client's keeper looks for the daemon again, whatever went wrong."""

import logging
from typing import Any

import pytest

from kvtier.client import Client, ClientDeadlines
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.testing.child import await_true


def test_a_fault_that_nobody_thought_of_ends_no_keeper(caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout("test", 1, 16, 4096, "float32", "")
    space = KeySpace(bytes(32), "{}", layout, "float32", "test")
    deadlines = ClientDeadlines(reconnect_s=0.01)
    tries: list[str] = []

    class NoPath:
        def __getattr__(self, name: str) -> None:
            tries.append(name)
            raise RuntimeError("a bug")

    no_path: Any = NoPath()
    client = Client(no_path, space, "test", deadlines=deadlines)
    with caplog.at_level(logging.ERROR, "kvtier.client"):
        client.start()
        await_true(lambda: len(tries) >= 20, "it has tried, and tried again")
    assert not client.is_attached
    own = [record for record in caplog.records if record.name == "kvtier.client"]
    assert len(own) == 1, "and does not fill the log"
    client.close()
