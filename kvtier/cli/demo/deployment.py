"""Runs ``kvtier serve`` with an engine in a temporary directory.

It is isolated from the user's own kvtier: settings from the environment are ignored, and the
socket, SSD directory, ports and Redis prefix are its own. The demo uses only what users have: the
log, the status document and `kvtier drop`.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from kvtier.cli.call import call_daemon
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.errors import KvtierError, StartError
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["DemoDeployment", "DemoFailed"]

_SETTINGS = (
    "http.listen=",
    "engine.listen=127.0.0.1:0",
    # The pool fits any single prompt, and the tiers below fit the whole pool.
    "engine.pool=1GiB",
    "cpu.capacity=1GiB",
    "ssd.capacity=2GiB",
    "ssd.free_space_floor=0",
    # Loads must not be cut off by a deadline.
    "client.load_deadline=30s",
    "ssd.deadline=30s",
    "remote.deadline=10s",
    # Every tier must have every block, and serve it.
    "ssd.write=store",
    "remote.write=store",
    "cost.restore=always",
    "remote.ttl=1h",  # removed at the end; a fallback if that fails
)

_START_TIMEOUT_S = 120.0
"""Importing torch and reading the model takes seconds, or many on a busy machine."""

_STOP_TIMEOUT_S = 45.0
"""More than the daemon needs to stop its engine and to flush."""

_SETTLE_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 10.0
_PAUSE_S = 0.05
_LOG_LINES = 12

T = TypeVar("T")


class DemoFailed(KvtierError):
    """The deployment did not behave as the demo expects."""


class DemoDeployment:
    """A daemon and an engine; the context manager stops both at its end."""

    def __init__(self, directory: Path, model: Path, redis_url: str) -> None:
        self.tiers = [tier for tier in TierName if redis_url or not tier.is_shared]
        self.url = ""
        self._socket = directory / "k.sock"
        self._log = directory / "log"
        self._command = [sys.executable, "-m", "kvtier", "serve", "--model", str(model)]
        self._command += ["--ends-with", str(os.getpid())]  # in case the demo is killed
        for setting in (
            f"daemon.socket={self._socket}",
            f"ssd.directory={directory / 'ssd'}",
            f"remote.key_prefix=kvtier-demo-{secrets.token_hex(4)}:",
            *_SETTINGS,
        ):
            self._command += ["--set", setting]
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        self._environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
        if redis_url:  # not on the command line, where every user could read a password
            self._environment["KVTIER_REMOTE_URL"] = redis_url
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        shared = [tier for tier in self.tiers if tier.is_shared]
        if self._is_running() and shared:
            with contextlib.suppress(KvtierError):
                self.drop(*shared)
        self.stop()

    def start(self) -> None:
        """Start both processes, and wait until they serve."""
        assert not self._is_running(), "one at a time"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 - kvtier itself
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                # Only the demo gets Ctrl-C, and then stops both in order.
                start_new_session=True,
            )
        self.url = self._wait_until(self._served_url, "the engine serves", _START_TIMEOUT_S)
        self._wait_until(self._is_attached, "the engine is attached", _START_TIMEOUT_S)

    def stop(self) -> None:
        """Stop both processes, in order if possible. Idempotent."""
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.terminate()
            child.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            # The session is ours: this also kills an engine that outlived the daemon.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def stat(self) -> dict[str, Any]:
        """Return the status document."""
        reply = self._ask(lambda stub: stub.Stat(pb.StatRequest(), timeout=_CALL_TIMEOUT_S))
        document: dict[str, Any] = json.loads(reply.json)
        return document

    def drop(self, *tiers: TierName) -> None:
        """Empty tiers. Raises DemoFailed if one keeps blocks."""
        request = pb.DropRequest(
            tiers=map(tier_to_wire, tiers), deadline_ms=int(_CALL_TIMEOUT_S * 1000)
        )
        reply = self._ask(lambda stub: stub.Drop(request, timeout=2 * _CALL_TIMEOUT_S))
        for tier, removed in zip(tiers, reply.removed, strict=True):
            if removed.error or removed.kept_blocks:
                kept = removed.error or f"kept {removed.kept_blocks} blocks"
                raise self._failure(f"the {tier} tier could not be emptied: {kept}")

    def settle(self, num_tokens: int) -> None:
        """Wait until every lower tier has that many tokens, and all transfers are done."""

        def is_settled() -> bool:
            document = self.stat()
            tiers = [document["tiers"][tier] for tier in self.tiers if tier in LOWER_TIERS]
            is_busy = (
                document["leases"]
                + document["pins"]
                + sum(
                    tier.get(queue, 0)
                    for tier in tiers
                    for queue in ("queued_reads", "queued_writes", "in_flight")
                )
            )
            return not is_busy and all(tier["tokens"] >= num_tokens for tier in tiers)

        self._wait_until(is_settled, f"{num_tokens} tokens are in every tier", _SETTLE_TIMEOUT_S)

    def block_tokens(self) -> int:
        """Return the number of tokens per block."""
        return int(self.stat()["engines"][0]["block_tokens"])

    def hit_tokens(self, tier: TierName) -> int:
        """Return how many tokens were found in a tier since the start."""
        document = self.stat()
        if tier is TierName.GPU:
            return int(document["tiers"]["gpu"]["hit_tokens"])
        return int(document["lookup_blocks"]["hit"][tier]) * self.block_tokens()

    def counts_hits(self, tier: TierName, num_tokens: int) -> bool:
        """Return whether the daemon soon counts that many hits; engines report once per second."""
        with contextlib.suppress(DemoFailed):
            return self._wait_until(
                lambda: self.hit_tokens(tier) >= num_tokens, "hits are counted", _CALL_TIMEOUT_S
            )
        return False

    def _is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _served_url(self) -> str:
        found = re.findall(r"^kvtier: \S+ at (http://\S+)$", self._log_text(), re.MULTILINE)
        return found[-1] if found else ""

    def _is_attached(self) -> bool:
        document = self.stat()
        cpu = document["tiers"]["cpu"]
        return bool(document["engines"]) and cpu["reserved_bytes"] == cpu["capacity_bytes"]

    def _ask(self, call: Callable[[Any], Any]) -> Any:
        try:
            return call_daemon(self._socket, call)
        except StartError as error:
            raise self._failure(str(error)) from error

    def _wait_until(self, poll: Callable[[], T], what: str, timeout_s: float) -> T:
        """Return the first true result of ``poll``. Raises KvtierError after the timeout."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            if found := poll():
                return found
            if not self._is_running():
                raise self._ending()
            if time.monotonic() > deadline_s:
                raise self._failure(f"timed out after {timeout_s:.0f} s, waiting until {what}")
            time.sleep(_PAUSE_S)

    def _ending(self) -> KvtierError:
        """Return why the child exited: its own error if it did not start."""
        assert self._child is not None
        refusal = re.search(r"^kvtier: (.+?): (.+); (.+)$", self._log_text(), re.MULTILINE)
        if self._child.returncode == 2 and refusal:
            return StartError(*refusal.groups())
        return self._failure(f"kvtier serve exited with {self._child.returncode}")

    def _failure(self, problem: str) -> DemoFailed:
        lines: Sequence[str] = self._log_text().splitlines()[-_LOG_LINES:]
        return DemoFailed("\n  ".join([f"{problem}; end of its log:", *lines]))

    def _log_text(self) -> str:
        return self._log.read_text(errors="replace")
