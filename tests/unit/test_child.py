"""The kit that starts processes: what it waits for, what it shows, and what it ends."""

import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvtier.testing.child import Child, await_true, free_port, work_directory

ECHO = "import sys, signal; print('started', *sys.argv[1:], flush=True); signal.pause()"


def python(log_path: Path, source: str = ECHO, *arguments: str) -> Child:
    return Child([sys.executable, "-S", "-c", source, *arguments], log_path)


def test_what_is_true_at_last_is_returned() -> None:
    answers = iter([0, "", None, [1]])
    assert await_true(lambda: next(answers), "the list") == [1]


def test_what_is_never_true_is_named_and_ends_in_time() -> None:
    start_s = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"timed out after 0\.05 s waiting for: a miracle; last result: 0"
    ):
        await_true(lambda: 0, "a miracle", 0.05)
    assert time.monotonic() - start_s < 5


def test_it_is_looked_at_even_without_time() -> None:
    assert await_true(lambda: 7, "a number", 0) == 7


def test_a_child_is_ended_with_its_context(tmp_path: Path) -> None:
    with python(tmp_path / "log", ECHO, "well") as child:
        child.await_log("started well")
        assert child.is_running
    assert not psutil.pid_exists(child.pid)
    assert child.wait() == -signal.SIGKILL


def test_a_child_that_ends_too_soon_shows_what_it_said(tmp_path: Path) -> None:
    with (
        python(tmp_path / "log", "print('no luck'); raise SystemExit(3)") as child,
        pytest.raises(AssertionError, match=r"(?s)ended with 3.*no luck"),
    ):
        child.await_log("ready")


def test_a_failure_within_shows_the_log(tmp_path: Path) -> None:
    def fail() -> None:
        with python(tmp_path / "log") as child:
            child.await_log("started")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    assert "started" in caught.value.__notes__[0]


def test_a_child_can_be_made_to_stand_still(tmp_path: Path) -> None:
    with python(tmp_path / "log") as child:
        child.await_log("started")
        with child.stopped():
            assert psutil.Process(child.pid).status() == psutil.STATUS_STOPPED
            with pytest.raises(AssertionError, match="still running"):
                child.wait(0.01)
        assert child.stop() == -signal.SIGTERM


def test_no_port_is_given_twice_not_even_by_two_processes(tmp_path: Path) -> None:
    source = "from kvtier.testing.child import free_port as p; print(*(p() for _ in range(100)))"
    ports = [free_port() for _ in range(100)]
    with (
        Child([sys.executable, "-c", source], tmp_path / "one") as one,
        Child([sys.executable, "-c", source], tmp_path / "two") as two,
    ):
        assert one.wait(60) == two.wait(60) == 0, one.log + two.log
    # The second may have been given what the first gave back when it ended.
    for other in (one, two):
        assert len({*ports, *map(int, other.log.split())}) == 200


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        taken = server.getsockname()[1]
        assert taken not in {free_port() for _ in range(199)}


def test_a_directory_has_a_short_name_and_goes_with_its_context() -> None:
    with work_directory() as directory:
        (directory / "file").touch()
        assert len(str(directory)) < 40, "there is room for a socket's name"
    assert not directory.exists()
