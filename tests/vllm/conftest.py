"""Real vLLM servers, each shared by all tests of its release and model; a node for each test.

``make test-vllm`` makes the environments and the models; without it these tests are skipped.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer, kvtier_transfer
from tests.shim.storage import StorageShim

HOME = Path(__file__).resolve().parents[2] / ".vllm"

NUM_BLOCKS = 40
"""Of vLLM's: so few that it has to preempt; a prompt of the greatest length takes 32 of them."""


LOOKUP_TIMEOUT_MS = 5000
"""Long: on a machine that tests keep busy a lookup that is late would be a miss."""


@pytest.fixture(scope="session")
def start() -> Callable[..., VllmServer]:
    """Return what starts a server that looks for its daemon in a directory."""

    def start(release: str, model: str, directory: Path, **flags: Any) -> VllmServer:
        log_path = directory / f"vllm{len(list(directory.glob('vllm*.log')))}.log"
        return VllmServer(
            HOME / release,
            HOME / "models" / model,
            log_path,
            kvtier_transfer(directory / "k.sock", lookup_timeout_ms=LOOKUP_TIMEOUT_MS),
            **{"num_gpu_blocks_override": NUM_BLOCKS} | flags,
        )

    return start


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest, start: Callable[..., VllmServer]) -> Iterator[VllmServer]:
    """A server of the release and the model that the test is parametrized with."""
    release, model = request.param
    with work_directory() as directory, start(release, model, directory) as server:
        yield server.await_ready()
        assert "Traceback" not in server.child.log


@pytest.fixture
def served(vllm: VllmServer, redis_server: str, tmp_path: Path) -> RunningNode:
    """Settings of a daemon where the server looks for it, with tiers that have nothing yet."""
    settings = {
        "daemon.socket": str(vllm.child.log_path.parent / "k.sock"),
        "cpu.capacity": "96MiB",
        "cpu.slab": "8MiB",
        "ssd.capacity": "256MiB",
        "ssd.segment": "32MiB",
        "ssd.directory": str(tmp_path / "ssd"),
        "ssd.scrub_rate": "0B",  # it would find what a test damages before the test looks
        "remote.url": redis_server,
        "remote.deadline": "2s",
        "remote.key_prefix": f"{tmp_path.name}:",
    }
    return RunningNode(tmp_path, settings)


@pytest.fixture
def disk(served: RunningNode, tmp_path: Path) -> Iterator[StorageShim]:
    """Faults for the SSD tier, which is the only slow one then."""
    with StorageShim(tmp_path / "ssd", tmp_path) as shim:
        served.environment |= shim.environment
        served.settings["remote.url"] = ""
        yield shim
