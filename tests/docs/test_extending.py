"""The connector in docs/extending.md restores from a daemon what it has stored there."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()
PROMPT = list(range(64 * 3 + 5))


def example() -> dict[str, Any]:
    """Return what the page's connector defines."""
    (code,) = (
        code
        for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        if "class ToyEngine" in code
    )
    names: dict[str, Any] = {}
    exec(compile(code, "docs/extending.md", "exec"), names)
    return names


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def test_the_connector_of_the_page_restores_what_it_stored(node: RunningNode) -> None:
    computed: list[int] = []

    def compute(tokens: list[int]) -> bytes:
        computed.append(len(tokens))
        return bytes([len(tokens) % 251]) * 4096

    engine = example()["ToyEngine"](node.socket, bytes(range(32)), compute)
    try:
        cold, num_restored = engine.prefill("without a daemon", PROMPT)
        assert (len(cold), num_restored) == (3, 0)
        with node.daemon():
            assert engine.client.wait_attached(30)
            stored, num_restored = engine.prefill("first", PROMPT)
            assert (stored, num_restored) == (cold, 0)
            computed.clear()
            restored, num_restored = engine.prefill("second", PROMPT)
            assert (restored, num_restored) == (cold, 3)
            assert not computed
    finally:
        engine.client.close()
