"""A file lock: who holds it, whatever the disk says of the note in it."""

import errno
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.errors import StartError
from kvtier.lock import PathLock, acquire_lock, release_lock


@contextmanager
def without_room() -> Iterator[None]:
    """Let no file of this process grow, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_lock_is_held_where_its_note_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("pid 1 on host of an earlier holder\n")
    with without_room():
        lock = acquire_lock(path, "daemon.socket", "it")
    with pytest.raises(StartError, match="it is held by another process"):
        acquire_lock(path, "daemon.socket", "it")
    release_lock(lock)
    release_lock(acquire_lock(path, "daemon.socket", "it"))


def test_it_is_let_go_of_where_the_disk_has_become_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, _length: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    lock = acquire_lock(tmp_path / "lock", "ssd.directory", "it")
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "ftruncate", refuse)
        release_lock(lock)
    release_lock(acquire_lock(tmp_path / "lock", "ssd.directory", "it"))


def test_who_only_looks_whether_it_is_held_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A doctor looks, and must not keep an engine from its start."""
    looking = [acquire_lock(tmp_path / "lock", "daemon.socket", "it")]

    def pause(_seconds: float) -> None:
        while looking:
            release_lock(looking.pop())

    monkeypatch.setattr(time, "sleep", pause)
    release_lock(acquire_lock(tmp_path / "lock", "daemon.socket", "it"))
    assert not looking


def test_a_lock_whose_file_was_removed_is_held_again(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = PathLock(path, "daemon.socket", "it")
    assert lock.is_in_place()
    path.unlink()
    assert not lock.is_in_place()
    lock.renew()
    assert lock.is_in_place()
    with pytest.raises(StartError, match="it is held by pid"):
        acquire_lock(path, "daemon.socket", "it")
    lock.release()
    release_lock(acquire_lock(path, "daemon.socket", "it"))


def test_a_lock_that_another_process_holds_by_now_is_not_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = PathLock(path, "daemon.socket", "it")
    path.unlink()
    other = acquire_lock(path, "daemon.socket", "it")
    with pytest.raises(StartError, match="it is held by pid"):
        lock.renew()
    release_lock(other)
    lock.renew()
    lock.release()
