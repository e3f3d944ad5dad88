import os
from pathlib import Path

import pytest

from kvtier.errors import StartError
from kvtier.observe.secret_rotation import SecretRotation
from kvtier.secret import Secret, read_secret, read_tokens, secret_lines

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
    assert "is not a regular file" in _refused(tmp_path / "fifo")
    assert "is not a regular file" in _refused(tmp_path)
    assert "cannot read" in _refused(tmp_path / "missing")


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "UTF-8" in _refused(_file(tmp_path / "s", b"\xff" + SECRET.encode()))
    assert "1 MiB" in _refused(_file(tmp_path / "s", SECRET * (1 << 17)))


def test_lines_keep_their_numbers() -> None:
    assert secret_lines("# head\n\n one \r\n#two\nthree") == [(3, "one"), (5, "three")]


def test_a_file_may_have_some_tokens(tmp_path: Path) -> None:
    new, old = "n" * 32, "o" * 32
    assert read_tokens(_file(tmp_path / "s", f"# newest first\n{new}\n\n{old}\n"), "f") == (
        new,
        old,
    )
    for text, words in (
        ("", "contains no token"),
        (f"{new}\nshort", "line 2 of"),
        (f"{new}\n" * 9, "has 9 tokens"),
        (f"{new} {old}", "line 1 of"),
    ):
        with pytest.raises(StartError, match=words) as refused:
            read_tokens(_file(tmp_path / "s", text), "f")
        assert new not in str(refused.value)


# Exchanged while it is in use


class Volume:
    """A Secret as Kubernetes mounts it: links into a folder that is exchanged as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_written = 0

    def write(self, **files: str) -> None:
        self._num_written += 1
        folder = self.path / f"..{self._num_written}"
        folder.mkdir()
        for name, content in files.items():
            _file(folder / name, content)
            link = self.path / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        (self.path / "..new").symlink_to(folder.name)
        (self.path / "..new").replace(self.path / "..data")


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    volume = Volume(tmp_path)
    volume.write(one="1", two="1")
    return volume


def both_of(volume: Volume) -> Secret[str]:
    """Return a secret of two files that have to be the same."""
    paths = (volume.path / "one", volume.path / "two")

    def read() -> str:
        one, two = (read_secret(path, "some.field") for path in paths)
        if one != two:
            raise StartError("some.field", "one is not of the other", "exchange both")
        return one

    return Secret("both", lambda: paths, read)


def test_what_is_exchanged_counts_once_it_was_seen_twice(volume: Volume) -> None:
    both = both_of(volume)
    assert not both.look()
    volume.write(one="2", two="2")
    assert not both.look(), "somebody may be writing"
    assert both.value == "1"
    assert both.look()
    assert both.value == "2"
    assert not both.look()
    volume.write(one="2", two="2")
    assert [both.look(), both.look()] == [False, False], "nothing else is said"


def test_files_that_change_at_every_look_are_waited_for(volume: Volume) -> None:
    both = both_of(volume)
    for number in range(5):
        volume.write(one=str(number), two="half")
        assert not both.look()
    assert both.value == "1"
    assert not both.fault


def test_what_is_no_good_changes_nothing_and_is_tried_again(volume: Volume) -> None:
    both = both_of(volume)
    volume.write(one="2", two="3")
    assert not both.look()
    for _ in range(3):
        with pytest.raises(StartError, match="one is not of the other"):
            both.look()
        assert (both.value, both.fault != "") == ("1", True)
    volume.write(one="3", two="3")
    assert [both.look(), both.look()] == [False, True]
    assert (both.value, both.fault) == ("3", "")


def test_the_old_one_may_come_back(volume: Volume) -> None:
    both = both_of(volume)
    volume.write(one="2", two="3")
    both.look()
    with pytest.raises(StartError):
        both.look()
    volume.write(one="1", two="1")
    assert [both.look(), both.look()] == [False, False]
    assert (both.value, both.fault) == ("1", "")


def test_a_file_that_is_gone_or_opened_to_others_is_refused(volume: Volume) -> None:
    both = both_of(volume)
    path = (volume.path / "one").resolve()
    for change, words in (
        (lambda: path.chmod(0o644), "other users can access"),
        (path.unlink, "cannot read"),
        (path.mkdir, "is not a regular file"),
    ):
        change()
        both.look()
        with pytest.raises(StartError, match=words):
            both.look()
        assert both.value == "1"


def test_who_asks_is_answered_at_once(volume: Volume) -> None:
    both = both_of(volume)
    volume.write(one="2", two="2")
    assert both.reload()
    assert both.value == "2"
    assert [both.look(), both.look()] == [False, False], "it has been read already"
    volume.write(one="3", two="x")
    with pytest.raises(StartError):
        both.reload()
    assert both.value == "2"


def test_what_is_wrong_is_said_once(volume: Volume, caplog: pytest.LogCaptureFixture) -> None:
    both, rotation = both_of(volume), SecretRotation()
    caplog.set_level("INFO")
    volume.write(one="2", two="3")
    for _ in range(5):
        rotation.look([both])
    volume.write(one="4", two="4")
    for _ in range(5):
        rotation.look([both])
    volume.write(one="4", two="5")
    for _ in range(5):
        rotation.look([both])
    refused = "new secret rejected, keeping the previous one"
    assert caplog.messages == [refused, "secret reloaded", refused]
    assert rotation.reload([both]) == [both.fault]
    assert caplog.messages[3:] == [refused], "who asks is told again"
