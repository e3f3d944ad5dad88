"""The unit under a real systemd: it serves within its sandbox, is watched, reloaded and stopped."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.testing.child import await_true, free_port, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import PatternEngine
from tests.integration.systemd_machine import Machine, booted

pytestmark = pytest.mark.slow

LATE_S = 60.0
"""For a daemon to start on a busy machine."""


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with work_directory() as directory, booted(directory) as machine:
        yield machine


@pytest.fixture
def node(machine: Machine) -> Iterator[RunningNode]:
    """The unit's daemon, as seen from out here; not started yet, and stopped in the end."""
    socket = machine.root / "run/kvtier/kvtier.sock"
    yield RunningNode(Path("/nowhere"), {"daemon.socket": str(socket)})
    machine.systemctl("stop", "kvtier")


def settings() -> str:
    return f"""
[daemon]
socket = "/run/kvtier/kvtier.sock"
[cpu]
capacity = "16MiB"
slab = "1MiB"
[ssd]
directory = "/var/cache/kvtier"
capacity = "64MiB"
segment = "4MiB"
free_space_floor = "0"
write = "store"
[cost]
probe = "off"
restore = "always"
[http]
listen = "127.0.0.1:{free_port()}"
"""


ENGINE = """
from tests.integration.pattern import PatternEngine
from kvtier.config.model import default_socket
client = PatternEngine(default_socket()).client
client.start()
assert not client.is_attached
print("looking", flush=True)
assert client.wait_attached(60)
"""
"""An engine that nobody has told where the daemon is; as vLLM's, it may come first."""


def test_it_is_found_by_engines_and_the_doctor(machine: Machine, node: RunningNode) -> None:
    python = ("env", "PYTHONPATH=/opt/checkout:/opt/packages", "LD_LIBRARY_PATH=/opt/python/lib")
    machine.configure(settings())
    with machine.begin(*python, "/opt/python/bin/python3", "-c", ENGINE) as engine:
        engine.await_log("looking")
        machine.systemctl("start", "kvtier")
        assert engine.wait(LATE_S) == 0
    file = machine.root / "etc/kvtier/kvtier.toml"
    doctor = ("/opt/kvtier/bin/kvtier", "doctor", "--json")
    found = json.loads(machine.run(*doctor).stdout)["checks"]
    assert found[0]["found"] == "/etc/kvtier/kvtier.toml (default)"
    assert "runs as pid" in found[1]["found"]
    file.chmod(0o600)
    found = json.loads(machine.run("runuser", "-u", "nobody", "--", *doctor).stdout)["checks"]
    assert found[0]["verdict"] == "warn"
    assert found[0]["found"].startswith("user 65534 cannot read /etc/kvtier/kvtier.toml")
    file.write_text("[cpu]\ncapacty = '1GiB'\n")
    found = json.loads(machine.run(*doctor).stdout)["checks"]
    assert found[0]["verdict"] == "fail"
    assert "/etc/kvtier/kvtier.toml:2" in found[0]["found"]


def kernel_tells(machine: Machine, name: str) -> dict[str, str]:
    """Return a file of the main process, by the words that its lines begin with."""
    text = machine.run("cat", f"/proc/{machine.show('MainPID')}/{name}").stdout
    lines = (line.replace(":", "  ", 1).split("  ", 1) for line in text.splitlines())
    return {line[0]: line[-1].strip() for line in lines}


def test_it_serves_within_its_sandbox_and_stops(machine: Machine, node: RunningNode) -> None:
    machine.configure(settings())
    machine.systemctl("start", "kvtier")
    with PatternEngine(node.socket) as engine:
        node.drop("ssd")
        engine.store(1, 4)
        assert node.await_blocks("ssd", 4)["tiers"]["ssd"]["detail"]["direct_io"]
        node.drop("cpu")
        assert engine.load(1, 4) == (["ssd"] * 4, "complete")
    await_true(lambda: machine.show("StatusText") == "serving: cpu up, ssd up", "it says so")
    assert not machine.run("/opt/kvtier/bin/kvtier", "stat").returncode, "found without being named"
    status = kernel_tells(machine, "status")
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["CapBnd"], 16) == 0
    limits = kernel_tells(machine, "limits")
    assert limits["Max core file size"].split()[0] == "0"
    machine.systemctl("reload", "kvtier")
    (machine.root / "etc/kvtier/kvtier.toml").write_text(settings() + "nonsense = 1\n")
    assert machine.run("systemctl", "reload", "kvtier").returncode, "a bad file is refused"
    assert machine.show("ActiveState") == "active"
    machine.systemctl("stop", "kvtier")
    assert machine.show("Result") == "success", machine.log
    assert machine.show("ExecMainStatus") == "0"
    assert (machine.root / "run/kvtier").is_dir(), "containers may have it mounted"


def test_one_that_stands_still_is_ended_and_started_again(
    machine: Machine, node: RunningNode
) -> None:
    machine.configure(settings(), WatchdogSec="5s", RestartSec="100ms")
    machine.systemctl("start", "kvtier")
    before = machine.show("MainPID")
    with PatternEngine(node.socket) as engine:
        engine.store(2, 4)
        node.await_idle()
    num_blocks = node.stat()["tiers"]["ssd"]["blocks"]
    machine.systemctl("kill", f"--signal={signal.SIGSTOP.name}", "kvtier")
    await_true(lambda: machine.show("NRestarts") != "0", "the watchdog ends it", LATE_S)
    await_true(lambda: machine.show("ActiveState") == "active", "it is started again", LATE_S)
    assert machine.show("MainPID") != before
    assert node.stat()["tiers"]["ssd"]["blocks"] == num_blocks
    assert "Fatal Python error: Aborted" in machine.log, "and what each thread was doing"


def test_one_that_cannot_start_is_tried_until_that_is_put_right(
    machine: Machine, node: RunningNode
) -> None:
    machine.configure(settings() + "[remote]\nurl = 'nonsense'\n", RestartSec="100ms")
    assert machine.run("systemctl", "start", "kvtier").returncode
    assert "remote.url" in machine.log
    machine.configure(settings(), RestartSec="100ms")
    await_true(lambda: machine.show("ActiveState") == "active", "it starts by itself", LATE_S)
    assert node.stat()["tiers"]["cpu"]["state"] == "up"
