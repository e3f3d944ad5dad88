"""Fixtures of every suite: a real redis-server, and the seed of the run."""

import contextlib
import gc
import logging
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from kvtier.observe.log_output import LogWriter
from kvtier.testing.child import free_port
from tests.programs import guard_programs, missing, redis_program

if "PYTEST_XDIST_WORKER" in os.environ:
    # Engines of several workers, each with a thread a core, would wait for each other's threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Have hypothesis draw the same examples each time, unless it was given a seed to explore.

    A shell without job control has what it starts in the background ignore SIGINT, and with it
    whatever a test starts and wants to interrupt.
    """
    guard_programs()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("hypothesis_seed", default=None) is None:
        settings.register_profile("kvtier", derandomize=True)
        settings.load_profile("kvtier")


def pytest_report_header(config: pytest.Config) -> str:
    profile = config.getoption("hypothesis_seed", default=None)
    order = config.getoption("randomly_seed", default=None)
    return f"seeds: random order {order}, hypothesis {profile or 'derived from each test'}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    if lines := missing(report.longrepr[2] for report in skipped):  # path, line, reason
        terminalreporter.section("programs that are not installed")
        terminalreporter.write("".join(f"{line}\n" for line in lines))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with tests that take minutes first, so that no worker is left alone with one."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the tests, torch and all they import: a million objects stay.

    Looking through them again and again is a quarter of the start.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def umask_of_its_own() -> Iterator[None]:
    """A daemon that a test runs in its own process sets the umask, and leaves it behind."""
    before = os.umask(0o077)
    os.umask(before)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def log_of_its_own() -> Iterator[None]:
    """A command that a test runs in its own process sets up the log, and leaves it behind."""
    root, ours = logging.getLogger(), logging.getLogger("kvtier")
    levels = root.level, ours.level
    yield
    for handler in [each for each in root.handlers if isinstance(each, LogWriter)]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of our own; yields its URL, with a password."""
    port, password = free_port(), secrets.token_hex(8)
    directory = tmp_path_factory.mktemp("redis")
    configuration = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "dir": directory,
        "save": '""',
        "appendonly": "no",
        "unixsocket": directory / "redis.sock",
        "unixsocketperm": "700",
    }
    file = directory / "redis.conf"
    file.write_text("".join(f"{key} {value}\n" for key, value in configuration.items()))
    server = subprocess.Popen([redis_program(), file], stdout=subprocess.DEVNULL)
    try:
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        _wait_until_it_answers(url, server)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)


def _wait_until_it_answers(url: str, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 20
    with redis.Redis.from_url(url, socket_timeout=5) as client:
        while True:
            try:
                client.ping()
            except (redis.ConnectionError, redis.TimeoutError):
                assert time.monotonic() < deadline, "the redis-server does not answer"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"the server ended: {server.wait(0.02)}") from None
            else:
                return


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the model that `make setup` fetches; without it half the proof would be skipped."""
    path = Path(__file__).resolve().parents[1] / ".model" / "smollm2-135m-instruct.gguf"
    assert path.is_file(), f"there is no {path}; run make setup"
    return path
