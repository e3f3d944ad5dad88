"""What a machine lacks is said before anything is allocated."""

import errno
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli.preflight import check_pool, check_start, find_problems
from kvtier.config import Config, load_config
from kvtier.daemon.supervisor import engine_lock
from kvtier.daemon.tiers.memory import MemoryFiles, available_memory_bytes
from kvtier.errors import StartError
from kvtier.lock import acquire_lock, release_lock
from kvtier.tiers.ssd import space

GIB = 1 << 30


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    from tests.engine.models import save_tiny

    return str(save_tiny(tmp_path / "tiny-llama"))


def configured(tmp_path: Path, **overrides: str) -> Config:
    given = {
        "daemon.socket": str(tmp_path / "run" / "k.sock"),
        "ssd.directory": str(tmp_path / "ssd"),
        "ssd.capacity": "8MiB",
        "ssd.segment": "1MiB",
        "ssd.free_space_floor": "0B",
        "ssd.required": "true",
        "cpu.capacity": "64MiB",
        "http.listen": "127.0.0.1:0",
    }
    return load_config(None, given | {k.replace("__", "."): v for k, v in overrides.items()}, {})


def machine(tmp_path: Path, free_gib: int = 8, cgroup: str = "") -> MemoryFiles:
    root = tmp_path / "cgroup"
    root.mkdir(exist_ok=True)
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:   {free_gib * GIB >> 10} kB\n"
    )
    (tmp_path / "self_cgroup").write_text(cgroup)
    return MemoryFiles(tmp_path / "meminfo", tmp_path / "self_cgroup", root)


def limited(folder: Path, limit: str, used: int, cached: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    stat = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{stat} {cached}\n")


def refused(config: Config, files: MemoryFiles) -> StartError:
    with pytest.raises(StartError) as caught:
        check_start(config, files)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_fit_machine_passes(tmp_path):
    check_start(configured(tmp_path), machine(tmp_path))
    assert (tmp_path / "ssd").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "ssd").iterdir()), "the proof of writing is gone"


def test_this_machine_tells_its_memory():
    room = available_memory_bytes()
    assert room is None or room > 0


def test_more_memory_than_the_machine_has(tmp_path):
    error = refused(configured(tmp_path, cpu__capacity="8GiB"), machine(tmp_path, free_gib=8))
    assert error.field == "cpu.capacity"
    assert "8192MiB" in error.problem
    assert "7920MiB" in error.remedy


def test_a_larger_pool_than_the_machine_has_room_for(tmp_path):
    files = machine(tmp_path, free_gib=8)
    config = configured(tmp_path, engine__pool="9GiB")
    with pytest.raises(StartError) as caught:
        check_pool(config, files)
    assert caught.value.field == "engine.pool"
    assert "8192MiB" in caught.value.remedy
    check_pool(configured(tmp_path, engine__pool="8GiB"), files)
    # Elsewhere than in this memory the device itself says what it has.
    check_pool(configured(tmp_path, engine__pool="9GiB", engine__device="cuda"), files)
    check_start(config, files)  # without a model this daemon starts no engine


@pytest.mark.slow
def test_what_one_command_starts_has_to_fit_together(tmp_path, tiny):
    files = machine(tmp_path, free_gib=8)
    sizes = {"cpu__capacity": "4GiB", "engine__pool": "4GiB"}
    check_start(configured(tmp_path, **sizes), files)
    together = configured(tmp_path, **sizes, engine__model=tiny)
    error = refused(together, files)
    assert error.field == "cpu.capacity"
    assert "4360MiB for the rest" in error.problem, "with the page tables of the arena"
    assert "at most 3832MiB" in error.remedy
    on_device = configured(tmp_path, **sizes, engine__model=tiny, engine__device="cuda")
    check_start(on_device, files)
    lock = acquire_lock(engine_lock(together.daemon.socket), "daemon.socket", "the engine")
    check_start(together, files)  # an engine that outlived the last daemon has its pool already
    release_lock(lock)


@pytest.mark.parametrize(("version", "line"), [(2, "0::/a/b\n"), (1, "4:cpu,memory:/a/b\n3:x:/\n")])
def test_the_smallest_limit_of_the_cgroups_counts(tmp_path, version, line):
    files = machine(tmp_path, free_gib=64, cgroup=line)
    root = files.cgroup_root if version == 2 else files.cgroup_root / "memory"
    limited(root / "a" / "b", "max" if version == 2 else str(1 << 62), 0, version=version)
    limited(root / "a", str(4 * GIB), 3 * GIB, cached=GIB, version=version)
    assert available_memory_bytes(files) == 2 * GIB


def test_a_limit_beyond_which_the_kernel_slows_counts_as_well(tmp_path):
    files = machine(tmp_path, free_gib=64, cgroup="0::/a\n")
    limited(files.cgroup_root / "a", "max", GIB)
    (files.cgroup_root / "a" / "memory.high").write_text(f"{3 * GIB}\n")
    assert available_memory_bytes(files) == 2 * GIB


def test_a_cgroup_named_as_on_the_host_is_found_at_the_root(tmp_path):
    files = machine(tmp_path, free_gib=64, cgroup="0::/kubepods/pod7/c9\n")
    limited(files.cgroup_root, str(GIB), 0)
    assert available_memory_bytes(files) == GIB


def test_no_kernel_files_mean_no_limit(tmp_path):
    files = MemoryFiles(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert available_memory_bytes(files) is None


def test_a_socket_path_longer_than_linux_allows(tmp_path):
    # 107 bytes for the longer of two sockets, whose name has ".arena" at its end.
    error = refused(configured(tmp_path, daemon__socket="/tmp/" + "s" * 98), machine(tmp_path))
    assert error.field == "daemon.socket"
    assert "2 bytes too long" in error.problem


def test_a_file_where_the_socket_should_be(tmp_path):
    (tmp_path / "k.sock").write_text("not a socket")
    config = configured(tmp_path, daemon__socket=str(tmp_path / "k.sock"))
    assert refused(config, machine(tmp_path)).field == "daemon.socket"


def test_a_file_where_a_directory_should_be(tmp_path):
    (tmp_path / "ssd").write_text("a file")
    error = refused(configured(tmp_path), machine(tmp_path))
    assert error.field == "ssd.directory"
    assert "file exists" in error.problem


def test_a_directory_that_cannot_be_made(tmp_path):
    config = configured(tmp_path, ssd__directory="/proc/kvtier")
    assert refused(config, machine(tmp_path)).field == "ssd.directory"


def test_no_ssd_tier_needs_no_directory(tmp_path):
    config = configured(tmp_path, ssd__directory="/proc/kvtier", ssd__enabled="false")
    check_start(config, machine(tmp_path))


def test_what_keeps_an_ssd_tier_out_does_not_keep_a_daemon_from_starting(tmp_path):
    config = configured(tmp_path, ssd__directory="/proc/kvtier", ssd__required="false")
    check_start(config, machine(tmp_path))
    assert [lack.field for lack in find_problems(config)] == ["ssd.directory"]


def test_more_disk_than_there_is(tmp_path):
    error = refused(configured(tmp_path, ssd__capacity="4000TiB"), machine(tmp_path))
    assert error.field == "ssd.capacity"
    assert "ssd.directory" in error.remedy


def test_only_what_the_tier_itself_has_in_its_directory_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    directory = tmp_path / "ssd"
    directory.mkdir()
    others = directory / "photos.tar"
    with others.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 << 20)
    assert refused(configured(tmp_path), machine(tmp_path)).field == "ssd.capacity"
    others.rename(directory / f"{1:016x}.segment")
    check_start(configured(tmp_path), machine(tmp_path))


def test_a_disk_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    def dead(_directory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(space.shutil, "disk_usage", dead)
    error = refused(configured(tmp_path), machine(tmp_path))
    assert (error.field, error.problem) == ("ssd.directory", f"{tmp_path}/ssd: input/output error")


def test_a_floor_that_leaves_no_room(tmp_path):
    error = refused(configured(tmp_path, ssd__free_space_floor="4000TiB"), machine(tmp_path))
    assert error.field == "ssd.capacity"
    assert "lower ssd.free_space_floor" in error.remedy


def test_a_model_that_is_not_there(tmp_path):
    config = configured(tmp_path, engine__model=str(tmp_path / "absent.gguf"))
    error = refused(config, machine(tmp_path))
    assert error.field == "engine.model"
    assert "GGUF" in error.remedy


def test_an_address_that_others_listen_on(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        error = refused(configured(tmp_path, http__listen=address), machine(tmp_path))
    assert error.field == "http.listen"
    assert address in error.problem
