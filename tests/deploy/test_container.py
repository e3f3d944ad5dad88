"""What manifests take away from a daemon, taken away from a real one, which serves all the same.

The daemon has namespaces of its own (processes, IPC, mounts), a root that nobody can write to, no
capability, no way to more rights, and no system call beyond those of our seccomp profile: the first
other one ends it. An engine of another user has namespaces of its own too; what both share is a
directory. This is what two containers are, without the images.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from kvtier.testing.child import Child, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, fetch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.redis,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make namespaces"),
]

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "deploy" / "kubernetes" / "components" / "seccomp" / "kvtier.json"
ENGINE_USER = 2000

APART = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")

CONTAINER = """
mount --bind "$1" "$1"
mount -o remount,bind,ro /
shift
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs -- "$@"
"""

UNDER_PROFILE = """
import json, os, sys
import pyseccomp
profile = json.load(open(sys.argv[1]))
allowed = pyseccomp.SyscallFilter(pyseccomp.KILL_PROCESS)
kinds = {"SCMP_CMP_EQ": pyseccomp.EQ, "SCMP_CMP_MASKED_EQ": pyseccomp.MASKED_EQ}
for rule in profile["syscalls"]:
    is_allowed = rule["action"] == "SCMP_ACT_ALLOW"
    action = pyseccomp.ALLOW if is_allowed else pyseccomp.ERRNO(rule["errnoRet"])
    arguments = [
        pyseccomp.Arg(each["index"], kinds[each["op"]], each["value"], each.get("valueTwo", 0))
        for each in rule.get("args", ())
    ]
    for name in rule["names"]:
        try:
            number = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
        except ValueError:
            continue  # another machine's, or a newer kernel's
        if number >= 0:
            allowed.add_rule(action, number, *arguments)
allowed.load()
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Imports and reads all that it needs before the rules hold."""

ENGINE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import kvtier.client
from tests.integration.pattern import PatternEngine
user = int(sys.argv[3])
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
with PatternEngine(Path(sys.argv[2])) as engine:
    for prompt in range(40):
        assert engine.store(prompt) == 4
    print("stored", flush=True)
    sys.stdin.readline()
    tiers = [tier for prompt in range(40) for tier in engine.load(prompt)[0]]
    print(*sorted(set(tiers)), len(tiers))
"""
"""Imports first: this interpreter may lie where the other user cannot read."""


def as_container(volume: Path, *command: str) -> list[str]:
    return [*APART, "sh", "-ec", CONTAINER, "sh", str(volume), *command]


def inside(container: Child) -> psutil.Process:
    """The process of a container that is its number 1."""
    (first,) = psutil.Process(container.pid).children()
    return first


def test_a_daemon_in_a_container_serves_an_engine_in_another(redis_server: str) -> None:
    with work_directory() as directory:
        directory.chmod(0o711)
        node = RunningNode(
            directory,
            {"daemon.allowed_uids": str(ENGINE_USER), "remote.url": redis_server},
        )
        profiled = (sys.executable, "-c", UNDER_PROFILE, str(PROFILE))
        command = as_container(directory, *profiled, *kvtier_command("serve", *node.arguments()))
        with Child(command, directory / "log", {"PYTHONPATH": str(ROOT)}) as container:
            container.await_log("event=ready .*pid=1 ")
            process = inside(container)
            status = Path(f"/proc/{process.pid}/status").read_text()
            for line in ("CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
                assert line in status
            apart = {name: namespace(process.pid, name) for name in ("pid", "ipc", "mnt")}
            assert all(found != namespace(os.getpid(), name) for name, found in apart.items())

            with engine_beside(node) as engine:
                assert say(engine) == "stored"
                ssd = node.await_blocks("ssd", 160)["tiers"]["ssd"]
                assert ssd["detail"]["direct_io"]
                node.drop("cpu")
                assert tell(engine) == "ssd 160"
            assert json.loads(fetch(f"http://127.0.0.1:{node.http_port}/readyz"))["ready"]
            assert node.metric("kvtier_ready") == 1
            assert node.stat()["tiers"]["remote"]["state"] == "up"
            process.send_signal(signal.SIGTERM)
            assert container.wait() == 0, container.log


def test_a_sidecar_outlives_its_daemon_and_hands_on_the_signal_to_stop() -> None:
    with work_directory() as directory:
        node = RunningNode(directory)
        manifest = ROOT / "deploy" / "kubernetes" / "components" / "sidecar" / "sidecar.yaml"
        spec = yaml.safe_load(manifest.read_text())["spec"]["template"]["spec"]
        *shell, script, name = spec["initContainers"][0]["command"]
        assert (name, "sleep 5" in script) == ("kvtier", True)
        script = script.replace("sleep 5", "sleep 0.1")
        file = directory / "kvtier.toml"
        file.write_text("[cpu]\nsize = 1\n")
        serve = (*kvtier_command("serve", *node.arguments()), "--config", str(file))
        profiled = (sys.executable, "-c", UNDER_PROFILE, str(PROFILE), shutil.which(shell[0]))
        command = [*profiled, *shell[1:], script, *serve]
        with Child(command, directory / "log") as container:
            container.await_log("cpu.size")
            file.write_text("")
            ready = container.await_log(r"event=ready .*pid=(\d+)")  # the shell is there still
            container.send(signal.SIGTERM)
            container.wait()
            assert not psutil.pid_exists(int(ready[1]))


def namespace(pid: int, name: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{name}").readlink())


def engine_beside(node: RunningNode) -> "subprocess.Popen[str]":
    """An engine of another user, which has nothing of the daemon's but the directory."""
    words = (sys.executable, "-c", ENGINE, str(ROOT), str(node.socket), str(ENGINE_USER))
    return subprocess.Popen(
        [*APART, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def say(engine: "subprocess.Popen[str]") -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


def tell(engine: "subprocess.Popen[str]") -> str:
    told, _ = engine.communicate("go on\n", timeout=60)
    assert engine.returncode == 0
    return told.strip()
