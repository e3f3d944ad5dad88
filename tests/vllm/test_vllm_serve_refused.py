"""Unsupported vLLM releases and models: vLLM starts, logs one line, and nothing is cached."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import RELEASES, STARTED, prompt

pytestmark = [*STARTED, pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")]

NOT_CACHED = "vLLM's blocks are not cached"

NARROW = """
def apply():
    from kvtier.connectors.vllm import release

    release._NEWEST = (0, 1)
"""

BROKEN = 'raise ImportError("a broken dependency")\n'


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RunningNode]:
    settings = {"cpu.capacity": "96MiB", "cpu.slab": "8MiB", "ssd.enabled": "false"}
    served = RunningNode(tmp_path, settings)
    with served.daemon():
        yield served


def check_uncached(node: RunningNode, vllm: VllmServer, reason: str) -> None:
    """Check that a server answers the same each time, without kvtier, and logs the reason."""
    with vllm:
        vllm.await_ready()
        asked = prompt(1)
        assert vllm.ask(asked) == vllm.ask(asked)
        assert vllm.hit_tokens() == 0
        (line,) = (line for line in vllm.child.log.splitlines() if NOT_CACHED in line)
        assert reason in line
        assert "Traceback" not in vllm.child.log
    status = node.stat()
    assert not status["engines"]
    assert status["tiers"]["cpu"]["blocks"] == 0


@pytest.mark.parametrize("release", RELEASES[:1])
def test_a_model_that_vllm_cannot_compute_from_cached_context(
    release: str, node: RunningNode, start: Callable[..., VllmServer], tmp_path: Path
) -> None:
    """vLLM switches its own prefix caching off for the reference kernels for MLA on CPUs."""
    vllm = start(release, "mla", tmp_path, attention_backend="CPU_MLA", num_gpu_blocks_override=320)
    check_uncached(node, vllm, "vLLM's own prefix caching is off")


@pytest.mark.parametrize("release", RELEASES[:1])
def test_a_release_that_is_not_served(
    release: str, node: RunningNode, start: Callable[..., VllmServer], tmp_path: Path
) -> None:
    """Another plugin narrows the range of supported releases, in each of vLLM's processes."""
    plugins = tmp_path / "plugins"
    entry = plugins / "narrow-1.0.dist-info"
    entry.mkdir(parents=True)
    (plugins / "narrow.py").write_text(NARROW)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: narrow\nVersion: 1.0\n")
    (entry / "entry_points.txt").write_text("[vllm.general_plugins]\nnarrow = narrow:apply\n")
    vllm = start(release, "tiny", tmp_path, environment={"PYTHONPATH": str(plugins)})
    check_uncached(node, vllm, f"and this is {release}")


@pytest.mark.parametrize("release", RELEASES[:1])
def test_a_dependency_that_is_broken(
    release: str, node: RunningNode, start: Callable[..., VllmServer], tmp_path: Path
) -> None:
    package = tmp_path / "broken" / "xxhash"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    vllm = start(release, "tiny", tmp_path, environment={"PYTHONPATH": str(package.parent)})
    check_uncached(node, vllm, "ImportError: a broken dependency")
