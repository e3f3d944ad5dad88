"""Small files: replaced as a whole, whatever lies in the way, and not read where they are none."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.daemon.persistence.whole_file import read_file, replace_file


def a_file(path: Path) -> None:
    path.write_bytes(b"half of what a crash")


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("victim"))


def a_link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("obstacle", [a_file, a_link, a_link_to_nowhere, a_pipe])
def test_what_lies_in_the_way_of_the_successor_is_removed(
    tmp_path: Path, obstacle: Callable[[Path], None]
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "learned.json"
    victim.write_bytes(b"somebody else's")
    obstacle(tmp_path / "learned.json.new")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert victim.read_bytes() == b"somebody else's"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["learned.json", "victim"]


def test_a_file_that_cannot_be_replaced_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(OSError, match="taken"):
        replace_file(path, b"new")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"], "nothing is left behind"
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "gone" / "file", b"new")


def test_a_name_as_long_as_one_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    replace_file(path, b"new", successor=".12345")
    assert path.read_bytes() == b"new"


def test_only_the_beginning_of_a_file_is_read_and_no_link(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_file(path, 4) == b"cont"
    (tmp_path / "link").symlink_to(path)
    a_pipe(tmp_path / "pipe")
    for name in ("link", "pipe", "missing"):
        with pytest.raises(OSError, match=name):
            read_file(tmp_path / name, 4)
