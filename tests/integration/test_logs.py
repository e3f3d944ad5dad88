"""The logs of real processes: their form, what is never in them, and readers that do not read."""

import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvtier.testing.child import await_true, free_port, kvtier_command, work_directory
from kvtier.testing.running_node import RunningNode, complete, fetch
from tests.integration.pattern import PatternEngine

pytestmark = pytest.mark.slow

SECRET = "the-patient-is-called-Ottokar"
TOKENS = [201, 187, 223, 194, 209, 178, 231, 166] * 24
STOP_S = 60.0


@pytest.fixture
def directory() -> Iterator[Path]:
    with work_directory() as directory:
        yield directory


def post(url: str, body: bytes, path: str = "/v1/completions") -> tuple[int, str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def wrong_bodies(model: str) -> Iterator[Any]:
    """Yield bodies that are refused, each for another reason."""
    yield {"model": model, "prompt": [SECRET, 1]}
    yield {"model": model, "prompt": {"text": SECRET}}
    yield {"model": model, "prompt": SECRET, "max_tokens": -1}
    yield {"model": model, "prompt": SECRET, "max_tokens": 10**6}
    yield {"model": model, "prompt": SECRET, "stop": [[SECRET]]}
    yield {"model": model, "prompt": SECRET * 1000}
    yield {"model": model, "prompt": SECRET, "cache_salt": [SECRET]}
    yield {"model": model, "messages": [{"role": [SECRET], "content": SECRET}]}
    yield {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "x": SECRET}]}],
    }
    yield {"model": model, "prompt": [*TOKENS, -1]}


def ask_all(url: str) -> tuple[list[str], str]:
    """Send secrets in every way there is; returns the ids of answers, and what refusals say."""
    model = json.loads(fetch(f"{url}/v1/models"))["data"][0]["id"]
    prompts = (SECRET * 2, TOKENS)
    ids = [complete(url, prompt, 4, cache_salt=SECRET)["id"] for prompt in prompts]
    refusals = ""
    for body in wrong_bodies(model):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, told = post(url, json.dumps(body).encode(), path)
        assert status == http.HTTPStatus.BAD_REQUEST, (status, told)
        refusals += told
    status, told = post(url, f'{{"prompt": "{SECRET}'.encode())
    assert status == http.HTTPStatus.BAD_REQUEST
    return ids, refusals + told


def lines_of(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines()]


def test_a_request_is_found_in_both_logs_and_its_prompt_in_none(
    directory: Path, tiny_folder: Path
) -> None:
    settings = {"daemon.log_level": "debug", "daemon.log_format": "json", "cpu.capacity": "8MiB"}
    node = RunningNode(directory, settings)
    with node.start("serve") as daemon, node.start("engine", "--model", str(tiny_folder)) as engine:
        url = engine.await_log(r'"url": "(http://[^"]+)"')[1]
        await_true(lambda: node.stat()["engines"], "the engine is attached")
        ids, refusals = ask_all(url)
        request = f"{ids[-1]}-0"
        told = await_true(lambda: node.explain(request), "the last one was decided on")
        node.await_idle()
        documents = json.dumps([node.stat(), told])
        assert engine.stop() == 0
        assert daemon.stop() == 0
        logs = {"daemon": lines_of(daemon.log), "engine": lines_of(engine.log)}
        texts = [daemon.log, engine.log, refusals, documents]
    (serving,) = (each for each in logs["engine"] if each["event"] == "serving")
    assert serving["smallest_prefix_tokens"] == 64
    for name, event in (("daemon", "restore decision"), ("engine", "prompt finished")):
        (line,) = (
            each for each in logs[name] if each["event"] == event and each["request"] == request
        )
        assert line["decision"] == told["decision"]["number"], name
    for text in texts:
        assert SECRET not in text
        assert "Ottokar" not in text
        for separator in (",", ", ", " "):
            assert separator.join(map(str, TOKENS[:3])) not in text


def broken_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_pipe() -> int:
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)  # kept open by the daemon itself, which never reads it
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * 4096)
    return writing


@pytest.mark.parametrize("make", [broken_pipe, full_pipe, None])
def test_a_log_that_cannot_be_written_hurts_nobody(
    directory: Path, make: Callable[[], int] | None
) -> None:
    node = RunningNode(directory, {"daemon.log_level": "debug"})
    command = kvtier_command("serve", *node.arguments())
    if make is None:  # standard error is closed: the first file that is opened would take its place
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    stderr = make() if make else None
    with subprocess.Popen(command, stderr=stderr, close_fds=False) as daemon:
        if stderr is not None:
            os.close(stderr)
        try:
            await_true(lambda: is_ready(node), "the daemon is ready", 30)
            with PatternEngine(node.socket) as engine:
                for prompt in range(20):
                    engine.store(prompt, 4)
                    engine.lookup(prompt, 4)
                node.await_idle()
                assert is_ready(node)
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(STOP_S) == 0
        finally:
            daemon.kill()
    code, report = node.fsck()
    assert code == 0, report


def test_an_engine_serves_and_ends_whoever_reads_its_log_and_takes_its_traces(
    directory: Path, tiny_folder: Path
) -> None:
    port, stderr = free_port(), full_pipe()
    settings = {"engine.listen": f"127.0.0.1:{port}", "daemon.traces": "true"}
    node = RunningNode(directory, settings | {"daemon.log_level": "debug"})
    words = ["--alone", "--model", str(tiny_folder)]
    command = kvtier_command("engine", *node.arguments(), *words)
    environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with subprocess.Popen(command, stderr=stderr, close_fds=False, env=environment) as engine:
        os.close(stderr)
        try:
            url = f"http://127.0.0.1:{port}"
            await_true(lambda: answers(f"{url}/readyz"), "the engine is ready", 60)
            assert complete(url, TOKENS, 4)
            engine.send_signal(signal.SIGTERM)
            assert engine.wait(STOP_S) == 0
        finally:
            engine.kill()


def is_ready(node: RunningNode) -> bool:
    return answers(f"http://127.0.0.1:{node.http_port}/readyz")


def answers(url: str) -> bool:
    try:
        return bool(fetch(url))
    except (OSError, AssertionError):
        return False
