"""``kvtier serve --model``: the engine as a child that may die, and a daemon that may."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvtier.daemon.supervisor import engine_lock
from kvtier.testing.child import Child, await_true, free_port, work_directory
from kvtier.testing.running_node import RunningNode, complete, fetch, url_of

pytestmark = pytest.mark.slow

PROMPT = [3 + number * 7 % 250 for number in range(200)]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        port = free_port()
        yield RunningNode(directory, {"engine.listen": f"127.0.0.1:{port}"})


def engine_pid(node: RunningNode) -> int:
    """Wait until an engine is attached and return its process id."""
    engines = await_true(lambda: node.stat()["engines"], "an engine is attached", 30)
    pid: int = engines[0]["pid"]
    return pid


def end(pid: int) -> None:
    """Kill an engine that a killed daemon has left behind; it was started by this test."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        process.kill()
        process.wait(10)


@pytest.mark.long
def test_the_engine_may_die_and_the_daemon_may(node: RunningNode, tiny_folder: Path) -> None:
    serve = node.start("serve", "--model", str(tiny_folder))
    left = 0
    try:
        with serve:
            url = url_of(serve)
            first = engine_pid(node)
            left = first
            cold = complete(url, PROMPT)
            node.await_blocks("ssd", 3)

            os.kill(first, signal.SIGKILL)
            serve.await_log("engine ended")
            await_true(lambda: node.stat()["engines"] == [], "its session is over")
            second = engine_pid(node)
            left = second
            assert second != first
            serve.await_log(f"event=serving .*pid={second}")  # it attaches before it listens
            again = complete(url, PROMPT)
            assert again["choices"] == cold["choices"]
            assert again["kvtier"]["tier_tokens"]["cpu"] == 192, "the daemon kept its blocks"
            node.await_idle()

            serve.kill()
            assert psutil.pid_exists(second)
            alone = complete(url, [*PROMPT[:150], *PROMPT[:40]])
            assert alone["kvtier"]["decision"] in ("computed:daemon_away", "gpu_hit")
            next_serve = node.start("serve", "--model", str(tiny_folder))
            with next_serve:
                next_serve.await_log("adopted the engine")
                assert engine_pid(node) == second
                node.drop("gpu")
                loaded = complete(url, PROMPT)
                assert loaded["choices"] == cold["choices"]
                assert loaded["kvtier"]["tier_tokens"]["ssd"] == 192
                assert next_serve.stop() == 0
                await_true(lambda: not is_alive(second), "the adopted engine ended too", 20)
    finally:
        end(left)


@pytest.mark.long
def test_an_engine_whose_lock_file_was_removed_is_adopted(
    node: RunningNode, tiny_folder: Path
) -> None:
    left = 0
    try:
        with node.start("serve", "--model", str(tiny_folder)) as serve:
            url_of(serve)
            left = engine_pid(node)
            engine_lock(node.directory / "k.sock").unlink()
            serve.await_log("lock file was removed; created it again")
            serve.kill()
            with node.start("serve", "--model", str(tiny_folder)) as next_serve:
                next_serve.await_log("adopted the engine")
                assert engine_pid(node) == left
    finally:
        end(left)


@pytest.mark.long
def test_an_engine_with_other_options_is_not_adopted(node: RunningNode, tiny_folder: Path) -> None:
    left = 0
    try:
        with node.start("serve", "--model", str(tiny_folder)) as serve:
            url_of(serve)
            left = first = engine_pid(node)
            serve.kill()
        options = ("--set", "engine.max_sequences=8")
        with node.start("serve", "--model", str(tiny_folder), *options) as serve:
            serve.await_log("stopping an engine with other options")
            url_of(serve)
            await_true(lambda: not is_alive(first), "the old engine ended", 20)
            left = second = engine_pid(node)
            assert second != first
            assert serve.stop() == 0
    finally:
        end(left)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_stop_does_not_wait_for_a_model_to_load(node: RunningNode, tiny_folder: Path) -> None:
    with node.start("engine", "--alone", "--model", str(tiny_folder)) as engine:
        maps = Path(f"/proc/{engine.pid}/maps")
        await_true(lambda: "libtorch" in maps.read_text(), "the engine begins to load")
        engine.send(signal.SIGTERM)
        assert engine.wait() == -signal.SIGTERM
        assert "/v1" not in engine.log, "it never served"


def test_a_stop_ends_both(node: RunningNode, tiny_folder: Path) -> None:
    with node.start("serve", "--model", str(tiny_folder)) as serve:
        url = url_of(serve)
        pid = engine_pid(node)
        complete(url, PROMPT)
        await_true(lambda: node.stat()["tiers"]["cpu"]["blocks"] == 3, "its blocks were offered")
        assert json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"] == "tiny-llama"
        assert serve.stop() == 0
        assert not is_alive(pid)
        assert "Traceback" not in serve.log
        assert not node.socket.exists()
    with node.daemon():
        assert node.stat()["tiers"]["ssd"]["blocks"] == 3, "the stop wrote what was on its way"


def make_sliding(folder: Path) -> None:
    rewrite(folder, {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    rewrite(folder, {"sliding_window": 128})


def make_latent(folder: Path) -> None:
    rewrite(folder, {"model_type": "deepseek_v3", "kv_lora_rank": 64})


def make_unknown(folder: Path) -> None:
    rewrite(folder, {"model_type": "kvtier_test"})


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def rewrite(folder: Path, changes: dict[str, object]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("command", "change", "part"),
    [
        ("serve", make_sliding, "window"),
        ("serve", cut_weights, "weights"),
        ("engine", make_latent, "MLA"),
        ("engine", make_unknown, "kvtier_test"),
        ("engine", remove_weights, "safetensors"),
        ("engine", spoil_config, "config.json"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_be_served(
    node: RunningNode,
    tiny_folder: Path,
    tmp_path: Path,
    command: str,
    change: Callable[[Path], None],
    part: str,
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    change(folder)
    with node.start(command, "--model", str(folder)) as child:
        assert child.wait() == 2, child.log
        said = said_by(child)
        assert len(said) == 1, said
        assert said[0].startswith("kvtier: engine.model: ")
        assert part in said[0]
        assert ";" in said[0], "there is a remedy"
        assert not node.socket.exists()


def said_by(child: Child) -> list[str]:
    return [line for line in child.log.splitlines() if not line.startswith("time=")]


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("engine.listen", "in use", "cannot listen"),
        ("engine.device", "cuda:7", "CUDA"),
    ],
)
def test_an_engine_that_cannot_start_ends_the_daemon(
    node: RunningNode, tiny_folder: Path, key: str, value: str, part: str
) -> None:
    if key == "engine.device" and cuda_is_here():
        pytest.skip("there are CUDA devices here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if value == "in use":
            value = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = {key.replace(".", "__"): value}
        with node.start("serve", "--model", str(tiny_folder), **settings) as serve:
            assert serve.wait() == 2, serve.log
    said = said_by(serve)
    assert len(said) == 1, said
    assert said[0].startswith(f"kvtier: {key}: ")
    assert part in said[0]


def cuda_is_here() -> bool:
    return Path("/dev/nvidia0").exists()
