"""The tier behind vLLM's CPU tier: with vLLM's manager in each release, and in whole servers.

In the servers vLLM's KV cache is in a CPU's memory, so the copies between it and vLLM's CPU tier
are ours (``host_spec``); all else is vLLM's own.
"""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import RELEASES, STARTED, TIERS, Answer, from_tier, prompt

ROOT = Path(__file__).resolve().parents[2]

TRANSFER = {
    "kv_connector": "KvtierOffloadingConnector",
    "kv_connector_module_path": "kvtier.connectors.vllm_tier",
    "kv_role": "kv_both",
}
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONHASHSEED": "0",  # what 0.28 asks for
    "VLLM_KV_CACHE_LAYOUT": "HND",
}

pytestmark = [*STARTED, pytest.mark.xdist_group("vllm-tier")]


@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
@pytest.mark.parametrize("release", RELEASES)
def test_behind_the_manager_of_a_release(release: str) -> None:
    python = ROOT / ".vllm" / release / "bin" / "python"
    script = Path(__file__).with_name("in_vllm_tier.py")
    settings = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    words = [str(python), str(script)]
    done = subprocess.run(
        words, env=settings, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok in ") >= 10, done.stdout


def start(release: str, directory: Path) -> VllmServer:
    """Start a server with a CPU tier of 32 chunks and ours behind it."""
    tier = {
        "type": "KvtierTier",
        "module_path": "kvtier.connectors.vllm_tier",
        "socket": str(directory / "k.sock"),
        "lookup_timeout_ms": 5000,  # long: on a busy machine a late lookup would be a miss
    }
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.vllm.host_spec",
        "cpu_bytes_to_use": 16 << 20,
        "secondary_tiers": [tier],
    }
    number = len(list(directory.glob("vllm*.log")))
    return VllmServer(
        ROOT / ".vllm" / release,
        ROOT / ".vllm" / "models" / "tiny",
        directory / f"vllm{number}.log",
        TRANSFER | {"engine_id": f"{directory.name}-{number}", "kv_connector_extra_config": extra},
        environment=ENVIRONMENT,
        num_gpu_blocks_override=40,
    )


_NONE = pytest.param("", marks=pytest.mark.skip(reason="make test-vllm runs it"))


@pytest.fixture(scope="module", params=[*RELEASES] if RELEASES else [_NONE])
def vllm(request: pytest.FixtureRequest) -> Iterator[VllmServer]:
    with work_directory() as directory:
        try:
            with start(request.param, directory) as server:
                yield server.await_ready()
                assert "Traceback" not in server.child.log
        finally:
            for left in Path("/dev/shm").glob(f"vllm_offload_{directory.name}-*"):
                left.unlink()  # vLLM leaves its CPU tier behind where it is killed


@pytest.fixture
def node(vllm: VllmServer, redis_server: str, tmp_path: Path) -> RunningNode:
    """Settings of a daemon where the server looks for it, with tiers that have nothing yet."""
    settings = {
        "daemon.socket": str(vllm.child.log_path.parent / "k.sock"),
        "cpu.capacity": "96MiB",
        "cpu.slab": "8MiB",
        "ssd.capacity": "256MiB",
        "ssd.segment": "32MiB",
        "ssd.directory": str(tmp_path / "ssd"),
        "remote.url": redis_server,
        "remote.key_prefix": f"{tmp_path.name}:",
    }
    return RunningNode(tmp_path, settings)


def await_joined(node: RunningNode) -> None:
    await_true(lambda: len(node.stat()["engines"]) == 1, "the tier is attached", 20)


def forget(vllm: VllmServer) -> None:
    """Empty vLLM's own tiers, on its device and behind."""
    await_true(lambda: vllm.reset("?reset_external=true"), "its own caches are empty", 20)


def ask(vllm: VllmServer, node: RunningNode, asked: list[int]) -> Answer:
    """Ask with nothing in vLLM's own tiers and the daemon at rest."""
    forget(vllm)
    node.await_idle()
    before, loaded = found(node), vllm.hit_tokens()
    tokens = vllm.ask(asked)
    now = found(node)
    moved = frozenset(tier for tier in TIERS if now[tier] > before[tier])
    return Answer(tokens, int(vllm.hit_tokens() - loaded), moved)


def found(node: RunningNode) -> dict[str, int]:
    hits: dict[str, int] = node.stat()["lookup_blocks"]["hit"]
    return hits


def test_chunks_come_back_from_each_tier(vllm: VllmServer, node: RunningNode) -> None:
    asked = prompt(1)
    wanted = vllm.ask(asked)  # without a daemon
    with node.daemon():
        await_joined(node)
        assert ask(vllm, node, asked) == Answer(wanted)
        for tier in TIERS:
            node.await_blocks(tier, 4)
        for dropped, tier in zip(((), ("cpu",), ("cpu", "ssd")), TIERS, strict=True):
            node.drop(*dropped)
            assert ask(vllm, node, asked) == from_tier(wanted, 512, tier)
        longer = asked[:512] + prompt(2, 300)
        assert ask(vllm, node, longer).loaded == 512
        again = ask(vllm, node, longer)
        assert again.loaded == 768, "the rest was stored behind what came back"
        node.await_idle()


def test_what_vllm_has_itself_is_offered_to_a_new_daemon(
    vllm: VllmServer, node: RunningNode
) -> None:
    asked = prompt(3)
    wanted = vllm.ask(asked)
    assert vllm.ask(asked) == wanted
    with node.daemon():
        await_joined(node)
        # Its own cache has the front of it, and what it computes is behind that.
        vllm.ask(asked + prompt(4, 200))
        node.await_blocks("ssd", 6)
        assert ask(vllm, node, asked) == from_tier(wanted, 512, "cpu")


def test_a_daemon_that_goes_freezes_and_comes_back(vllm: VllmServer, node: RunningNode) -> None:
    asked = prompt(5)
    with node.daemon() as daemon:
        await_joined(node)
        wanted = vllm.ask(asked)
        node.await_blocks("ssd", 4)
        daemon.kill()
    forget(vllm)
    assert vllm.ask(asked) == wanted
    with node.daemon() as daemon:
        await_joined(node)
        assert ask(vllm, node, asked) == from_tier(wanted, 512, "ssd")
        forget(vllm)
        with daemon.stopped():
            assert vllm.ask(asked) == wanted
        again = from_tier(wanted, 512, "cpu")
        await_true(lambda: ask(vllm, node, asked) == again, "it is asked again", 20)


def test_many_at_once_in_a_small_pool(vllm: VllmServer, node: RunningNode) -> None:
    prompts = [prompt(10)[:256] + prompt(11 + number, 500) for number in range(8)]
    wanted = [vllm.ask(asked) for asked in prompts]
    with node.daemon(), ThreadPoolExecutor(8) as users:
        await_joined(node)
        for _ in range(3):
            forget(vllm)
            assert list(users.map(vllm.ask, prompts)) == wanted
        forget(vllm)
        status = node.await_idle()
        assert sum(status["lookup_blocks"]["hit"].values()) > 0
        assert not status["leases"] + status["pins"]


def test_another_process_finds_them(
    vllm: VllmServer, node: RunningNode, request: pytest.FixtureRequest
) -> None:
    release = request.node.callspec.params["vllm"]
    if release != RELEASES[0]:
        pytest.skip("one release shows it")
    asked = prompt(6)
    with node.daemon():
        await_joined(node)
        wanted = vllm.ask(asked)
        node.await_blocks("ssd", 4)
        with start(release, vllm.child.log_path.parent) as other:
            other.await_ready()
            await_true(lambda: len(node.stat()["engines"]) == 2, "both are attached", 20)
            assert other.ask(asked) == wanted
            assert other.hit_tokens() == 512
