"""A real systemd with a machine of its own: namespaces around it, and a copy of this system's root.

What it writes goes into memory and ends with it, apart from ``cache``, which lies on a real disk.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvtier.testing.child import Child, await_true
from tests.programs import requires

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy" / "systemd"

NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--cgroup")

# Arguments: where to put the machine, its cache, this Python, its packages, and this checkout. None
# may lie where it does here: the unit hides homes.
BOOT = r"""
set -eu
work=$1 cache=$2 python=$3 packages=$4 checkout=$5
mount --make-rprivate /
mount -t tmpfs tmpfs "$work"
mkdir "$work/upper" "$work/work" "$work/root"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$work/root"
cd "$work/root"
mount -t proc proc proc
mount --rbind /sys sys
umount -l sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in run tmp dev; do mount -t tmpfs tmpfs $folder; done
chmod 755 dev run
for node in null zero full random urandom tty; do
  touch dev/$node
  mount --bind /dev/$node dev/$node
done
ln -s /proc/self/fd dev/fd
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mkdir -p opt/python opt/packages opt/checkout opt/kvtier/bin var/cache/kvtier etc/kvtier
mount --bind "$python" opt/python
mount --bind "$packages" opt/packages
mount --bind "$checkout" opt/checkout
mount --bind "$cache" var/cache/kvtier
cat > opt/kvtier/bin/kvtier <<'END'
#!/bin/sh
export PYTHONPATH=/opt/checkout:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python3 -m kvtier "$@"
END
chmod 755 opt/kvtier/bin/kvtier
for target in sysinit basic shutdown kvtier-test; do
  printf '[Unit]\nDefaultDependencies=no\n' > etc/systemd/system/$target.target
done
cp opt/checkout/deploy/systemd/kvtier.service etc/systemd/system
cp opt/checkout/deploy/systemd/kvtier.toml etc/kvtier
chroot . systemd-sysusers /opt/checkout/deploy/systemd/kvtier.sysusers.conf
chroot . systemd-tmpfiles --create /opt/checkout/deploy/systemd/kvtier.tmpfiles.conf
exec env container=kvtier chroot . /lib/systemd/systemd --system --unit=kvtier-test.target
"""


class Machine:
    """A booted machine; ``root`` is the way into its files from here."""

    def __init__(self, pid: int) -> None:
        self._enter = ("nsenter", "--target", str(pid), "--root", "--wd=/", *NAMESPACES)
        self.root = Path(f"/proc/{pid}/root")

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command within, as root."""
        return subprocess.run(
            [*self._enter, *command], capture_output=True, text=True, check=False, timeout=60
        )

    def begin(self, *command: str) -> Child:
        """Start a command within, as root; its log lies among the machine's files."""
        return Child([*self._enter, *command], self.root / "run/begun.log")

    def systemctl(self, *words: str) -> str:
        done = self.run("systemctl", *words)
        state = self.run("systemctl", "status", "kvtier").stdout if done.returncode else ""
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{state}{self.log}"
        return done.stdout

    def show(self, name: str) -> str:
        return self.systemctl("show", "--property", name, "--value", "kvtier").strip()

    def configure(self, settings: str, **drop_in: str) -> None:
        """Write the configuration, and settings of the unit's [Service] section beside its own."""
        file = self.root / "etc/kvtier/kvtier.toml"
        file.write_text(settings)
        file.chmod(0o644)  # whatever an earlier test has left
        folder = self.root / "etc/systemd/system/kvtier.service.d"
        folder.mkdir(exist_ok=True)
        lines = {"StandardError": "append:/run/kvtier.log"} | drop_in
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        (folder / "test.conf").write_text(f"[Service]\n{text}")
        self.systemctl("daemon-reload")

    @property
    def log(self) -> str:
        """What the daemon wrote."""
        path = self.root / "run/kvtier.log"
        return path.read_text() if path.exists() else ""


@contextmanager
def booted(directory: Path) -> Iterator[Machine]:
    """Boot a machine whose cache is in ``directory``; skips where this one does not allow it."""
    requires("systemd")
    if os.geteuid():
        pytest.skip("only root can boot a machine")
    group = _cgroup() / f"kvtier-{os.getpid()}"
    group.mkdir()
    work, cache = directory / "machine", directory / "cache"
    work.mkdir()
    cache.mkdir()
    enter = f'echo $$ > "{group}/cgroup.procs"; exec "$@"'
    packages = sysconfig.get_path("purelib")
    arguments = [str(work), str(cache), sys.base_prefix, packages, str(ROOT)]
    boot = ["unshare", *NAMESPACES, "--fork", "--kill-child", "sh", "-c", BOOT, "boot", *arguments]
    try:
        with Child(["sh", "-c", enter, "enter", *boot], directory / "boot.log") as child:
            yield _await_booted(child)
    finally:
        await_true(lambda: _removed(group), "its control groups are gone", 30)


def _await_booted(child: Child) -> Machine:
    def look() -> Machine | None:
        assert child.is_running, child.log
        for inner in psutil.Process(child.pid).children():
            machine = Machine(inner.pid)
            if "running" in machine.run("systemctl", "is-system-running").stdout:
                return machine
        return None

    return await_true(look, "systemd runs", 30)


def _cgroup() -> Path:
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    if not found or not os.access(found[0], os.W_OK):
        pytest.skip("needs a cgroup2 hierarchy")
    return found[0]


def _removed(group: Path) -> bool:
    try:
        for folder, _, _ in os.walk(group, topdown=False):
            os.rmdir(folder)
    except OSError:
        return False
    return True
