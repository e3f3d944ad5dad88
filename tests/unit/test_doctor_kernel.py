"""What the doctor makes of kernels, limits and memory that this machine has not."""

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli.doctor import machine
from kvtier.cli.doctor.check import (
    Check,
    CheckContext,
    CheckVerdict,
    Finding,
    RunningDaemon,
    ok,
    run_checks,
)
from kvtier.config import load_config
from kvtier.errors import StartError, TierError
from kvtier.tiers.ssd.doctor import inspect_file_system, inspect_space
from kvtier.tiers.ssd.settings import ssd_settings
from kvtier.tiers.ssd.space import floor_beside_system

GIB = 1 << 30
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max locked memory         8388608              8388608              bytes
Max open files            64                   {}                 files
"""


def context(
    root: Path, files: Mapping[str, str], running: RunningDaemon | None = None, **settings: str
) -> CheckContext:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return CheckContext(root, load_config(None, overrides, {}), running)


def space_of(context: CheckContext) -> Finding:
    return inspect_space(ssd_settings(context.config), context)


def told(finding: Finding) -> CheckVerdict:
    assert bool(finding.remedy) == (finding.verdict is not CheckVerdict.OK)
    return finding.verdict


@pytest.mark.parametrize(
    ("release", "verdict"),
    [
        ("6.1.0-13-amd64", "ok"),
        ("5.14.0-427.el9.x86_64", "ok"),
        ("5.10.0-28-amd64", "warn"),
        ("4.18.0-553.el8", "fail"),
        ("", "fail"),
    ],
)
def test_kernels(tmp_path: Path, release: str, verdict: str) -> None:
    files = {"proc/sys/kernel/osrelease": f"{release}\n"}
    assert told(machine.inspect_kernel(context(tmp_path, files))) == verdict


@pytest.mark.parametrize(
    ("limit", "verdict"), [("unlimited", "ok"), ("65536", "ok"), ("1024", "warn"), ("64", "fail")]
)
def test_open_files(tmp_path: Path, limit: str, verdict: str) -> None:
    files = {"proc/self/limits": LIMITS.format(limit)}
    assert told(machine.inspect_descriptors(context(tmp_path, files))) == verdict


def test_limits_are_the_running_daemons_where_there_is_one(tmp_path: Path) -> None:
    files = {"proc/self/limits": LIMITS.format(64), "proc/77/limits": LIMITS.format(65536)}
    found = machine.inspect_descriptors(context(tmp_path, files, RunningDaemon(77)))
    assert told(found) == "ok"
    assert "the running daemon's" in found.found


def test_locked_memory_matters_with_a_gpu(tmp_path: Path) -> None:
    files = {"proc/self/limits": LIMITS.format(1024)}
    assert told(machine.inspect_locking(context(tmp_path, files))) == "ok"
    files["dev/nvidiactl"] = ""
    assert told(machine.inspect_locking(context(tmp_path, files))) == "warn"


def test_gpus(tmp_path: Path) -> None:
    on_gpu = {"engine__model": "/models/m", "engine__device": "cuda"}
    assert told(machine.inspect_gpu(context(tmp_path, {}))) == "ok"
    assert told(machine.inspect_gpu(context(tmp_path, {}, **on_gpu))) == "fail"
    driver = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: 12\n"
    found = machine.inspect_gpu(context(tmp_path, {"proc/driver/nvidia/version": driver}, **on_gpu))
    assert told(found) == "ok"
    assert "570.86.15" in found.found


def test_a_slow_clock_is_named(tmp_path: Path) -> None:
    name = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    assert told(machine.inspect_clock(context(tmp_path, {name: "hpet\n"}))) == "warn"


def test_several_nodes_are_told(tmp_path: Path) -> None:
    found = machine.inspect_numa_nodes(
        context(tmp_path, {"sys/devices/system/node/online": "0-1\n"})
    )
    assert "NUMA nodes 0-1" in found.found


def test_memory_counts_the_smallest_control_group(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {64 * GIB >> 10} kB\n",
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/pod/memory.current": "0\n",
    }
    small = context(tmp_path, files, cpu__capacity="2GiB")
    with pytest.raises(StartError, match="at most 764MiB"):
        machine.inspect_memory(small)
    assert told(machine.inspect_memory(context(tmp_path, files, cpu__capacity="512MiB"))) == "ok"
    assert told(machine.inspect_memory(context(tmp_path, files, RunningDaemon(1)))) == "ok"


def test_memory_that_is_promised_once_only(tmp_path: Path) -> None:
    left = f"CommitLimit: {3 * GIB >> 10} kB\nCommitted_AS: {2 * GIB >> 10} kB\n"
    files = {"proc/sys/vm/overcommit_memory": "2\n", "proc/meminfo": left}
    strict = context(tmp_path, files, cpu__capacity="2GiB")
    assert told(machine.inspect_overcommit(strict)) == "fail"
    assert told(machine.inspect_overcommit(context(tmp_path, files, cpu__capacity="1GiB"))) == "ok"
    usual = context(tmp_path, files | {"proc/sys/vm/overcommit_memory": "0\n"})
    assert told(machine.inspect_overcommit(usual)) == "ok"


def test_swap_is_a_fault_unless_the_daemon_gets_none(tmp_path: Path) -> None:
    head = "Filename Type Size Used Priority\n"
    assert told(machine.inspect_swap(context(tmp_path, {"proc/swaps": head}))) == "ok"
    files = {"proc/swaps": f"{head}/swap.img file 8388604 0 -2\n", "proc/self/cgroup": "0::/a\n"}
    assert told(machine.inspect_swap(context(tmp_path, files))) == "warn"
    files |= {"proc/77/cgroup": "0::/kv\n", "sys/fs/cgroup/kv/memory.swap.max": "0\n"}
    assert told(machine.inspect_swap(context(tmp_path, files, RunningDaemon(77)))) == "ok"


def test_no_shared_memory(tmp_path: Path) -> None:
    assert told(machine.inspect_shm(context(tmp_path, {}))) == "warn"


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("ext4", "ok"), ("xfs", "ok"), ("tmpfs", "fail"), ("overlay", "warn"), ("nfs4", "warn")],
)
def test_file_systems(tmp_path: Path, kind: str, verdict: str) -> None:
    folder = tmp_path / "a drive"
    folder.mkdir()
    place = str(folder).replace(" ", "\\040")
    mounts = f"22 1 0:21 / / rw - ext4 /dev/sda1 rw\n40 22 0:31 / {place} rw - {kind} x rw\n"
    here = context(tmp_path, {"proc/self/mountinfo": mounts}, ssd__directory=str(folder / "ssd"))
    found = inspect_file_system(ssd_settings(here.config), here)
    assert told(found) == verdict
    assert f"{kind} at {folder}" in found.found


@pytest.mark.parametrize("inspect", [lambda: 1 / 0, lambda: Path("/nowhere").stat()])
def test_a_check_that_raises_is_a_finding(inspect: object) -> None:
    ((_, found),) = run_checks([Check("it", inspect)])  # type: ignore[arg-type] # it never returns
    assert told(found) == "fail"


def test_a_check_that_hangs_keeps_no_other() -> None:
    never = threading.Event()

    def hang() -> Finding:
        never.wait(60)
        return ok("late")

    def refuse() -> Finding:
        raise TierError("no such thing")

    checks = [
        Check("hangs", hang, deadline_s=0.2, if_hung="look there"),
        Check("refuses", refuse),
        Check("is well", lambda: ok("well")),
    ]
    found = dict(run_checks(checks))
    never.set()
    assert found["hangs"].remedy == "look there"
    assert found["refuses"].found == "no such thing"
    assert found["is well"] == ok("well")


def test_what_others_have_above_is_not_room_for_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests take and free space meanwhile.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8 << 20))
    (tmp_path / f"{1:016x}.segment").write_bytes(bytes(8 << 20))

    def space(directory: Path) -> Finding:
        sizes = {"ssd__capacity": "16MiB", "ssd__segment": "1MiB", "ssd__free_space_floor": "0"}
        elsewhere = Path("/proc")  # as the root, so that this is not the system's own drive
        return space_of(context(elsewhere, {}, ssd__directory=str(directory), **sizes))

    assert told(space(tmp_path)) == "ok", "the tier's own files are part of its capacity"
    with pytest.raises(StartError, match="do not fit"):
        space(tmp_path / "ssd")


@pytest.mark.parametrize(
    ("free", "capacity", "floor", "verdict"),
    [
        (185, "160GiB", "1GiB", "warn"),  # 25 of 200 GiB would be left
        (185, "155GiB", "30GiB", "ok"),
        (185, "100GiB", "1GiB", "ok"),
        (30, "1GiB", "1GiB", "ok"),  # not what fills it
    ],
)
def test_the_systems_own_drive_keeps_what_a_kubelet_wants(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: int,
    capacity: str,
    floor: str,
    verdict: str,
) -> None:
    disk = SimpleNamespace(total=200 * GIB, free=free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    sizes = {"ssd__capacity": capacity, "ssd__free_space_floor": floor}
    found = space_of(context(tmp_path, {}, ssd__directory=str(tmp_path), **sizes))
    assert told(found) == verdict
    assert ("ssd.free_space_floor = 30GiB" in found.remedy) == (verdict == "warn")


def test_the_kubelets_drive_is_known_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=9 * GIB, free=9 * GIB)
    )
    config = load_config(None, {"ssd.capacity": "8GiB", "ssd.free_space_floor": "1MiB"}, {})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        assert floor_beside_system(ssd_settings(config), tmp_path, Path(root)) == 0
        (Path(root) / "etc").mkdir()
        (Path(root) / "etc" / "hosts").symlink_to(tmp_path)  # the runtime mounts it there
        assert floor_beside_system(ssd_settings(config), tmp_path, Path(root)) == 2 * GIB
