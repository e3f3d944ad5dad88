"""Runs a real ``vllm serve`` in tests and benchmarks, and ends it reliably.

Counters are read where an operator reads them, at ``/metrics``.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvtier.testing.child import Child, await_true, free_port

__all__ = ["VllmServer", "kvtier_transfer"]

_START_TIMEOUT_S = 600.0
"""vLLM imports itself in three processes: half a minute on an idle machine, minutes otherwise."""

_STOP_TIMEOUT_S = 40.0
_ANSWER_TIMEOUT_S = 120.0

_FLAGS: Mapping[str, object] = {
    "host": "127.0.0.1",
    "served-model-name": "m",
    "dtype": "float32",
    "max-model-len": 4096,
}


def kvtier_transfer(socket: Path, **extra: object) -> dict[str, Any]:
    """Return the ``--kv-transfer-config`` for the daemon at ``socket``."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": str(socket)} | extra,
    }


class VllmServer:
    """One server and all its processes. It ends with its context, or with this process.

    It starts at once; call ``await_ready`` before the first request.
    """

    def __init__(
        self,
        home: Path,
        model: Path,
        log_path: Path,
        transfer: Mapping[str, Any] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **flags: object,
    ) -> None:
        """``home`` is an environment with vLLM; ``flags`` have ``_`` for vLLM's ``-``."""
        self.url = f"127.0.0.1:{(port := free_port())}"
        given = {name.replace("_", "-"): value for name, value in flags.items()}
        if transfer is not None:
            given["kv-transfer-config"] = json.dumps(transfer)
        words = [*_ended_with_parent(), str(home / "bin" / "python")]
        words += ["-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        words += ["--enforce-eager", "--port", str(port)]
        for name, value in {**_FLAGS, **given}.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            words += [f"--{name}", *map(str, values)]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Releases look up a model's properties in a separate process, which takes ten seconds,
            # and cache them in a file.
            "VLLM_CACHE_ROOT": str(home / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise all servers use the same core
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        self.child = Child(words, log_path, settings | dict(environment or {}))

    def await_ready(self) -> Self:
        """Wait until it answers."""
        self.child.await_log("Application startup complete", _START_TIMEOUT_S)
        await_true(self._listens, "the server listens")
        return self

    def ask(self, prompt: Sequence[int], num_tokens: int = 16, **more: Any) -> list[int]:
        """Return the tokens of the greedy answer."""
        with self.asking(prompt, num_tokens, **more) as connection:
            answer = json.loads(_content(connection))
        tokens = answer["choices"][0]["token_ids"]
        assert isinstance(tokens, list), answer
        return tokens

    @contextlib.contextmanager
    def asking(
        self, prompt: Sequence[int], num_tokens: int = 16, **more: Any
    ) -> Iterator[http.client.HTTPConnection]:
        """Send a request and leave the response to the caller; the context hangs up."""
        body = {
            "model": "m",
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        with self._send("POST", "/v1/completions", body | more) as connection:
            yield connection

    def first_token_s(self, prompt: Sequence[int], **more: Any) -> float:
        """Return the seconds until the first token arrives."""
        started_s = time.perf_counter()
        with self.asking(prompt, 1, stream=True, **more) as connection:
            reply = connection.getresponse()
            line = reply.readline()
            seconds = time.perf_counter() - started_s
            assert line.startswith(b"data: {"), line + reply.read()
            reply.read()  # hanging up earlier would abort the request
        return seconds

    def reset(self, query: str = "") -> bool:
        """Empty the server's own cache; return whether it could."""
        with self._send("POST", f"/reset_prefix_cache{query}") as connection:
            return bool(json.loads(_content(connection))["success"])

    def forget(self) -> None:
        """Empty the server's own cache as soon as no request or store holds a block of it."""
        await_true(self.reset, "its own cache is empty")

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of its series of a name with these labels."""
        with self._send("GET", "/metrics") as connection:
            text = _content(connection).decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def hit_tokens(self) -> float:
        """Return how many tokens its connector has supplied."""
        return self.metric("vllm:external_prefix_cache_hits_total")

    def kill(self) -> None:
        """Kill all its processes at once, as a crash of the machine would."""
        for member in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.child.wait(_STOP_TIMEOUT_S)
        await_true(lambda: not self._members(), "all its processes have ended", _STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            error.add_note(f"log of {self.child.log_path}:\n{self.child.log[-4000:]}")
        if self.child.is_running:
            self.child.send(signal.SIGTERM)
            with contextlib.suppress(AssertionError):  # otherwise it is killed below
                self.child.wait(_STOP_TIMEOUT_S)
        self.kill()

    def _members(self) -> list[psutil.Process]:
        """Return the processes of its session, also after its first process has ended."""
        found: list[psutil.Process] = []
        for each in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                is_alive = each.status() != psutil.STATUS_ZOMBIE
                if is_alive and os.getsid(each.pid) == self.child.pid:
                    found.append(each)
        return found

    def _listens(self) -> bool:
        host, _, port = self.url.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    @contextlib.contextmanager
    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.url, timeout=_ANSWER_TIMEOUT_S)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            yield connection
        finally:
            connection.close()


def _ended_with_parent() -> list[str]:
    """Return a prefix with which the kernel ends a command if this process is killed."""
    return ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []


def _content(connection: http.client.HTTPConnection) -> bytes:
    reply = connection.getresponse()
    content = reply.read()
    assert reply.status == HTTPStatus.OK, f"{reply.status} {content!r}"
    return content
