"""The daemon as a process: it starts quickly or says why not, and ends in order."""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtier.testing.child import Child, free_port, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, fetch
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


def refusal(node: RunningNode, command: str = "serve", **changes: str | int) -> str:
    """Return the one line with which a process that cannot start ends."""
    with node.start(command, **changes) as child:
        assert child.wait() == 2, child.log
        lines = child.log.splitlines()
    said = [line for line in lines if not line.startswith("time=")]
    assert len(said) == 1, lines
    assert said[0].startswith("kvtier: "), said
    return said[0].removeprefix("kvtier: ")


def test_it_is_ready_in_about_a_second_and_loads_no_torch(node: RunningNode) -> None:
    with node.daemon() as daemon:
        took = psutil.Process(daemon.pid).cpu_times()
        print(f"ready after {time.monotonic() - daemon.started_s:.2f} s, {took}")
        assert took.user + took.system < 4, "on a machine that is busy it takes longer, not more"
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "torch" not in maps
        assert "transformers" not in maps
        assert fetch(f"http://127.0.0.1:{node.http_port}/healthz")
        assert fetch(f"http://127.0.0.1:{node.http_port}/readyz")
        assert daemon.stop() == 0


def test_files_and_sockets_are_this_users_alone(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        # 4 tokens of 2048 bytes a block; 16 MiB and 64 MiB of them.
        daemon.await_log(
            "shortest_prefix_tokens=4 token_bytes=2048 cpu_tokens=8192 ssd_tokens=32768"
        )
        engine.store(1)
        for path in (node.socket, node.socket.with_name("k.sock.arena")):
            assert path.stat().st_mode & 0o077 == 0, path
        for path in (node.directory / "ssd").iterdir():
            assert path.stat().st_mode & 0o077 == 0, path


def test_a_stop_writes_what_is_on_its_way_and_a_restart_finds_it(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        for prompt in range(20):
            assert engine.store(prompt, 8) == 8
        assert daemon.stop() == 0
    assert not node.socket.exists()
    with node.daemon(), PatternEngine(node.socket) as engine:
        assert node.stat()["tiers"]["ssd"]["blocks"] == 160
        for prompt in range(20):
            assert engine.load(prompt, 8) == (["ssd"] * 8, "complete")
        assert node.stat()["transfers"]["ssd_to_cpu"]["bytes"] == 160 * 8192
        assert node.stat()["lookup_blocks"]["miss"] == 0


def test_each_tier_is_dropped_by_itself(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1, 6)
        node.await_idle()
        assert engine.lookup(1, 6) == (["cpu"] * 6, "complete")
        assert node.drop("cpu") == {"cpu": 6}
        assert engine.load(1, 6) == (["ssd"] * 6, "complete")
        assert engine.load(1, 6) == (["cpu"] * 6, "complete")
        assert node.drop("ssd") == {"ssd": 6}
        assert engine.load(1, 6) == (["cpu"] * 6, "complete")
        assert node.drop("gpu", "cpu") == {"gpu": 0, "cpu": 6}
        assert engine.load(1, 6) == ([], "absent")
        tiers = node.await_idle()["tiers"]
        assert [tiers[name]["blocks"] for name in ("cpu", "ssd")] == [0, 0]
        assert engine.store(1, 6) == 6
        assert engine.load(1, 6) == (["cpu"] * 6, "complete")


def test_a_crashed_daemon_leaves_nothing_in_the_way(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_idle()
        daemon.kill()
    assert node.socket.exists(), "a crash leaves its socket behind"
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        assert engine.load(1) == (["ssd"] * 4, "complete")
        assert daemon.stop() == 0


def test_a_second_signal_ends_it_at_once(node: RunningNode) -> None:
    with node.daemon() as daemon, PatternEngine(node.socket) as engine:
        # Orders keep the first stop waiting for its grace: time enough for a second signal.
        assert engine.client.is_attached
        daemon.send(signal.SIGTERM)
        daemon.await_log("event=stopping")
        daemon.send(signal.SIGTERM)
        assert daemon.wait() in (0, -signal.SIGTERM)


def test_interrupting_it_is_a_clean_stop(node: RunningNode) -> None:
    with node.daemon() as daemon:
        daemon.send(signal.SIGINT)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log


def test_two_daemons_on_one_socket(node: RunningNode) -> None:
    with node.daemon() as daemon:
        said = refusal(node, ssd__directory=str(node.directory / "other"), http__listen="")
        assert said.startswith("daemon.socket: ")
        assert f"pid {daemon.pid}" in said
        assert node.stat()["pid"] == daemon.pid, "the first one goes on"


def test_two_daemons_on_one_ssd_directory(node: RunningNode) -> None:
    with node.daemon() as daemon:
        other = str(node.directory / "other.sock")
        said = refusal(node, daemon__socket=other, http__listen="")
        assert said.startswith("ssd.directory: ")
        assert f"pid {daemon.pid}" in said
        assert node.stat()["tiers"]["ssd"]["state"] == "up"


def test_an_http_port_in_use_is_refused_soon(node: RunningNode) -> None:
    with node.daemon():
        other = {
            "daemon__socket": str(node.directory / "other.sock"),
            "ssd__directory": str(node.directory / "other"),
        }
        start_s = time.monotonic()
        said = refusal(node, **other)
        assert said.startswith("http.listen: ")
        assert "in use" in said
        assert time.monotonic() - start_s < 20, "nothing is waited for"
    with node.daemon(), node.daemon(**other, http__listen=f"127.0.0.1:{free_port()}"):
        assert node.stat()["tiers"]["ssd"]["state"] == "up"


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("cpu.capacity", "lots", "lots"),
        ("cpu.capacity", "900TiB", "free memory"),
        ("cpu.slab", "1GiB", "cpu.capacity"),
        ("ssd.capacity", "900TiB", "free"),
        ("ssd.segment", "64MiB", "ssd.capacity"),
        ("ssd.directory", "/proc/kvtier", "/proc/kvtier"),
        ("ssd.directory", "/dev/null/kvtier", "/dev/null"),
        ("daemon.socket", "/proc/kvtier/k.sock", "/proc/kvtier"),
        ("daemon.socket", "/tmp/" + "long" * 30, "too long"),
        ("http.listen", "nowhere", "nowhere"),
        ("http.listen", "127.0.0.1:99999", "99999"),
        ("remote.url", "http://127.0.0.1", "remote.url"),
        ("engine.model", "/nowhere/model", "/nowhere/model"),
        ("cpu.capacty", "1GiB", "did you mean capacity"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    node: RunningNode, key: str, value: str, part: str
) -> None:
    said = refusal(node, **{"ssd__required": "true", key.replace(".", "__"): value})
    assert said.startswith(f"{key}: "), said
    assert part in said
    assert ";" in said, "there is a remedy"
    assert not node.socket.exists()


def limited(node: RunningNode, command: str, *limits: str) -> Child:
    """Start a command under limits that ``prlimit`` sets."""
    words = kvtier_command(command, *node.arguments(), "--set", "engine.model=/nowhere")
    environment = {"OPENBLAS_NUM_THREADS": "1"}  # on many cores OpenBLAS would fail first
    return Child(["prlimit", *limits, *words], node.directory / "limited.log", environment)


@pytest.mark.parametrize("command", ["serve", "engine"])
@pytest.mark.parametrize(
    ("limit", "part"),
    [
        ("--nofile=20:20", "open files: the hard limit (RLIMIT_NOFILE) is 20, at least 256"),
        ("--nofile=24:24", "ulimit -n"),
        ("--as=314572800", "ulimit -v"),  # bytes: not enough for the stacks of all threads
    ],
)
def test_a_limit_that_is_too_low_is_reported_in_one_line(
    node: RunningNode, command: str, limit: str, part: str
) -> None:
    with limited(node, command, limit) as child:
        assert child.wait() in {1, 2}, child.log
    (said,) = child.log.splitlines()
    assert said.startswith("kvtier: ")
    assert part in said


def test_the_soft_limit_of_open_files_is_raised(node: RunningNode) -> None:
    words = kvtier_command("serve", *node.arguments())
    command = ["prlimit", "--nofile=64:4096", *words]
    with Child(command, node.directory / "serve.log") as daemon:
        daemon.await_log("event=ready")
        assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
        assert daemon.stop() == 0


def test_a_configuration_file_is_held_to_the_same(node: RunningNode) -> None:
    file = node.directory / "kvtier.toml"
    file.write_text("[cpu]\ncapacity = 'much'\n")
    command = kvtier_command("serve", "--config", str(file))
    with Child(command, node.directory / "log") as child:
        assert child.wait() == 2
        assert "cpu.capacity" in child.log
        assert str(file) in child.log
        assert "Traceback" not in child.log


def test_a_directory_of_others_is_refused(node: RunningNode) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    closed = node.directory / "closed"
    closed.mkdir(mode=0o500)
    said = refusal(node, ssd__directory=str(closed / "ssd"), ssd__required="true")
    assert said.startswith("ssd.directory: ")


def test_stat_tells_the_same_on_the_command_line(node: RunningNode) -> None:
    with node.daemon(), PatternEngine(node.socket) as engine:
        engine.store(1)
        node.await_idle()
        command = kvtier_command("stat", "--socket", str(node.socket), "--json")
        told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        asked = node.stat()
        for key in ("uptime_s", "time_s"):
            assert told.pop(key) <= asked.pop(key)
        rates = [(each.pop("grown"), each["engines"][0].pop("lately")) for each in (told, asked)]
        for one, other in zip(*rates, strict=True):  # they are of the moment
            assert one.keys() == other.keys()
        assert told == asked
