import os
from pathlib import Path

import pytest

from kvtier.errors import StartError
from kvtier.secret import read_secret, secret_lines

SECRET = "do-not-show-this"


def _file(path: Path, content: str | bytes = SECRET, mode: int = 0o600) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(mode)
    return path


def _refused(path: Path) -> str:
    with pytest.raises(StartError) as refused:
        read_secret(path, "some.field")
    assert refused.value.field == "some.field"
    assert refused.value.remedy
    assert SECRET not in str(refused.value)
    return str(refused.value)


def test_a_closed_file_is_read(tmp_path: Path) -> None:
    assert read_secret(_file(tmp_path / "s"), "f") == SECRET
    assert read_secret(_file(tmp_path / "s", mode=0o400), "f") == SECRET


def test_it_may_be_a_link_as_in_a_kubernetes_volume(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(_file(tmp_path / "s"))
    assert read_secret(tmp_path / "link", "f") == SECRET


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o660, 0o620, 0o666, 0o777])
def test_an_open_file_is_refused(tmp_path: Path, mode: int) -> None:
    assert "chmod 600" in _refused(_file(tmp_path / "s", mode=mode))


def test_a_group_may_read_what_is_roots_alone(tmp_path: Path) -> None:
    path = _file(tmp_path / "s", mode=0o640)
    if os.geteuid() == 0:
        assert read_secret(path, "f") == SECRET
    else:
        assert "chmod 600" in _refused(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "s")
    os.chown(path, 65534, 65534)
    assert "another user" in _refused(path)


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "is no file" in _refused(tmp_path / "fifo")
    assert "is no file" in _refused(tmp_path)
    assert "cannot be read" in _refused(tmp_path / "missing")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "UTF-8" in _refused(_file(tmp_path / "s", b"\xff" + SECRET.encode()))
    assert "1 MiB" in _refused(_file(tmp_path / "s", SECRET * (1 << 17)))


def test_lines_keep_their_numbers() -> None:
    assert secret_lines("# head\n\n one \r\n#two\nthree") == [(3, "one"), (5, "three")]
