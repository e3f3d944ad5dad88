"""Signals: how a closing terminal, a reload and a stop affect a daemon, its engine and clients."""

import http.client
import json
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psutil
import pytest

from kvtier.testing.child import Child, await_true, free_port, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, fetch, url_of
from tests.integration.terminal import Terminal

pytestmark = pytest.mark.slow

START_S = 120.0
END_S = 60.0
WITHOUT_END = 50_000
"""A number of tokens that no test waits for."""


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory, {"engine.listen": f"127.0.0.1:{free_port()}"})


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a context long enough for any answer in these tests."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("long") / "model")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 4 * WITHOUT_END
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Asking:
    """A request to an engine, on its own thread; ``received`` has the response so far."""

    def __init__(self, url: str, num_tokens: int, *, is_stream: bool = True) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.received = b""
        self.fault: Exception | None = None
        name = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
        body = {"model": name, "prompt": [3, 4, 5], "max_tokens": num_tokens, "ignore_eos": True}
        self._body = json.dumps(body | {"stream": is_stream, "temperature": 0})
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=START_S)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @classmethod
    def streaming(cls, url: str, num_tokens: int = WITHOUT_END) -> Self:
        """Send the request, and wait for the first token."""
        asking = cls(url, num_tokens)
        await_true(lambda: b"data:" in asking.received, "it streams", END_S)
        return asking

    def wait(self) -> bytes:
        """Wait for the end of the response and return it; fails if it was cut off."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), "the response has not ended"
        assert self.fault is None, self.fault
        return self.received

    def _run(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/completions", self._body, headers)
            reply = self._connection.getresponse()
            self.status, self.headers = reply.status, dict(reply.headers)
            while piece := reply.read1(1 << 16):
                self.received += piece
        except (OSError, http.client.HTTPException) as error:
            self.fault = error
        finally:
            self._connection.close()


def engine_of(serve: Child) -> int:
    return int(serve.await_log(r'event="engine started" pid=(\d+)')[1])


def processes_of(node: RunningNode) -> list[psutil.Process]:
    """Return all kvtier processes of a node, no matter how they were started."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if any(str(node.socket) in word for word in words) and "kvtier" in words:
                found.append(process)
    return found


# A terminal that closes


def typed(terminal: Terminal, node: RunningNode, form: str, *more: str) -> None:
    """Type a command into the shell of a terminal, and wait until the daemon is ready."""
    command = shlex.join(kvtier_command("serve", *node.arguments(), *more))
    terminal.await_shown(r"^\$")
    terminal.press(form.format(command) + "\n")
    terminal.await_true(lambda: b"event=ready" in terminal.written, "it is ready", START_S)


def shell() -> Terminal:
    return Terminal(["bash", "--norc", "-i"], environment={"PS1": "$ "})


@pytest.mark.parametrize("form", ["{}", "{} &"])
def test_nothing_outlives_its_terminal(node: RunningNode, model: Path, form: str) -> None:
    with shell() as terminal:
        typed(terminal, node, form, "--model", str(model))
        terminal.await_true(lambda: b"/v1" in terminal.written, "the engine serves", START_S)
        assert len(processes_of(node)) == 2
        terminal.close()
        await_true(lambda: not processes_of(node), "both have ended", END_S)


@pytest.mark.parametrize("form", ["nohup {} 2>&1 | cat &", "setsid {} 2>&1 | cat &"])
def test_a_daemon_that_nohup_or_setsid_started_survives_and_reloads(
    node: RunningNode, form: str
) -> None:
    with shell() as terminal:
        typed(terminal, node, form)
        (daemon,) = (each for each in processes_of(node) if "python" in each.name())
        try:
            terminal.close()
            await_true(lambda: terminal.is_over, "the shell has ended", END_S)
            daemon.send_signal(signal.SIGHUP)
            await_true(lambda: node.stat()["config"]["reloads"], "it reloads", END_S)
        finally:
            daemon.terminate()
            daemon.wait(END_S)


# A reload by signal


def test_an_engine_survives_a_hangup(node: RunningNode, model: Path) -> None:
    with node.start("serve", "--model", str(model)) as serve:
        pid = engine_of(serve)
        os.kill(pid, signal.SIGHUP)  # it has only just started
        url = url_of(serve)
        stream = Asking.streaming(url, 200)
        os.killpg(serve.pid, signal.SIGHUP)
        assert stream.wait().endswith(b"data: [DONE]\n\n")
        assert b"error" not in stream.received
        await_true(lambda: node.stat()["config"]["reloads"], "the daemon has reloaded", END_S)
        os.killpg(serve.pid, signal.SIGHUP)
        assert serve.stop() == 0
        assert engine_of(serve) == pid
        assert "engine ended" not in serve.log


def test_an_engine_without_a_daemon_survives_a_hangup(node: RunningNode, model: Path) -> None:
    engine, url = node.engine(model, "--alone")
    with engine:
        engine.send(signal.SIGHUP)
        assert Asking(url, 5).wait().endswith(b"data: [DONE]\n\n")
        assert engine.stop() == 0


# A stop


def group_of(child: Child, number: signal.Signals) -> None:
    os.killpg(child.pid, number)


ALONE = ("engine", "--alone")


@pytest.mark.parametrize(
    ("command", "send", "number"),
    [
        (("serve",), Child.send, signal.SIGTERM),
        (("serve",), group_of, signal.SIGTERM),
        (("serve",), group_of, signal.SIGINT),
        (ALONE, Child.send, signal.SIGTERM),
    ],
    ids=["daemon", "group", "interrupt", "engine"],
)
def test_a_stop_lets_requests_finish_and_a_second_one_aborts_the_others(
    node: RunningNode,
    model: Path,
    command: tuple[str, ...],
    send: Callable[[Child, signal.Signals], None],
    number: signal.Signals,
) -> None:
    settings = {"daemon__stop_grace": "300s", "engine__pool": "64MiB"}
    with node.start(*command, "--model", str(model), **settings) as child:
        url = url_of(child)
        endless = Asking.streaming(url)
        whole = Asking(url, WITHOUT_END, is_stream=False)
        short = Asking.streaming(url, 100)
        send(child, number)
        child.await_log("log=kvtier.engine event=stopping")
        refused = Asking(url, 5)
        assert b"engine_not_ready" in refused.wait()
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        with pytest.raises(AssertionError, match="503"):
            fetch(f"{url}/readyz")
        assert fetch(f"{url}/healthz") == b"alive"
        said = short.wait()
        assert b'"finish_reason":"length"' in said
        assert said.endswith(b"data: [DONE]\n\n")
        assert endless.fault is None

        send(child, number)
        assert_told(endless, whole)
        assert child.wait() == 0
        assert "Traceback" not in child.log
        assert not processes_of(node)


@pytest.mark.parametrize("command", [("serve",), ALONE], ids=["serve", "engine"])
def test_clients_are_told_when_the_grace_period_ends(
    node: RunningNode, model: Path, command: tuple[str, ...]
) -> None:
    settings = {"daemon__stop_grace": "10s", "engine__pool": "64MiB"}
    with node.start(*command, "--model", str(model), **settings) as child:
        url = url_of(child)
        endless = Asking.streaming(url)
        whole = Asking(url, WITHOUT_END, is_stream=False)
        assert child.stop() == 0
        assert_told(endless, whole)
        assert "Traceback" not in child.log
        assert "is killed" not in child.log


def assert_told(stream: Asking, whole: Asking) -> None:
    *_, error, done, _ = stream.wait().split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "engine_not_ready"
    assert done == b"data: [DONE]"
    assert json.loads(whole.wait())["error"]["code"] == "engine_not_ready"
    assert whole.status == 503
    assert whole.headers["retry-after"]
