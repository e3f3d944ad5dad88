"""The file of a Unix socket: when it is replaced; that of another process is never removed."""

import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.errors import StartError
from kvtier.testing.child import work_directory
from kvtier.transfer.socket_file import SocketFile


def listening(stack: ExitStack, path: Path) -> None:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(path))
    listener.listen(1)


def test_it_appears_complete_and_is_removed_by_its_owner() -> None:
    with work_directory() as directory, ExitStack() as stack:
        file = SocketFile(directory / "k.sock", 0o666)
        with file.placing() as fresh:
            listening(stack, fresh)
            assert not file.path.exists()
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o666
        assert file.is_in_place()
        assert [each.name for each in directory.iterdir()] == ["k.sock"]
        file.remove()
        assert not file.is_in_place()
        assert not any(directory.iterdir())


def test_the_file_of_a_dead_process_is_replaced() -> None:
    with work_directory() as directory, ExitStack() as stack:
        with ExitStack() as dead:
            listening(dead, directory / "k.sock")
        file = SocketFile(directory / "k.sock", 0o600)
        with file.placing() as fresh:
            listening(stack, fresh)
        assert file.is_in_place()


def test_a_socket_that_another_process_listens_on_is_left_alone() -> None:
    with work_directory() as directory, ExitStack() as stack:
        path = directory / "k.sock"
        listening(stack, path)
        inode = path.stat().st_ino
        with (
            pytest.raises(StartError, match="in use by another process") as refused,
            SocketFile(path, 0o600).placing(),
        ):
            raise AssertionError("it must not get this far")
        assert refused.value.field == "daemon.socket"
        assert path.stat().st_ino == inode


def test_a_file_that_is_not_a_socket_is_left_alone() -> None:
    with work_directory() as directory:
        path = directory / "k.sock"
        path.write_text("of a user")
        with pytest.raises(StartError, match="not a socket"), SocketFile(path, 0o600).placing():
            raise AssertionError("it must not get this far")
        assert path.read_text() == "of a user"


def test_what_another_process_has_put_in_its_place_stays() -> None:
    with work_directory() as directory, ExitStack() as stack:
        file = SocketFile(directory / "k.sock", 0o600)
        with file.placing() as fresh:
            listening(stack, fresh)
        file.path.unlink()
        assert not file.is_in_place()
        listening(stack, file.path)
        assert not file.is_in_place()
        file.remove()
        assert file.path.is_socket()


def test_a_listener_that_cannot_be_made_leaves_nothing() -> None:
    with work_directory() as directory, ExitStack() as stack:
        file = SocketFile(directory / "k.sock", 0o600)

        def place() -> None:
            with file.placing() as fresh:
                listening(stack, fresh)
                raise OSError("no descriptor")

        with pytest.raises(OSError, match="no descriptor"):
            place()
        assert not any(directory.iterdir())
