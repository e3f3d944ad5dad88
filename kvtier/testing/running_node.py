"""Runs a node of real processes in tests: a daemon and its engines, called over their sockets.

Counters are read where an operator reads them: in the status document and at ``/metrics``.
"""

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvtier.api.rpc.operator_client import local_operator
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.testing.child import Child, await_true, free_port, kvtier_command
from kvtier.v1 import engine_pb2, operator_pb2_grpc
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_to_wire

__all__ = ["RunningNode", "complete", "fetch", "readiness", "url_of"]

_CALL_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 60.0


def fetch(url: str, body: Mapping[str, Any] | None = None) -> bytes:
    """Return the response of a URL, to ``body`` as JSON if given; fails unless it is 200."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.netloc, timeout=_ANSWER_TIMEOUT_S)
    try:
        if body is None:
            connection.request("GET", where.path)
        else:
            sent = {"Content-Type": "application/json"}
            connection.request("POST", where.path, json.dumps(body), sent)
        reply = connection.getresponse()
        content = reply.read()
        assert reply.status == http.HTTPStatus.OK, f"{url}: {reply.status} {content!r}"
    finally:
        connection.close()
    return content


def url_of(engine: Child) -> str:
    """Wait until an engine serves, and return its URL."""
    return engine.await_log(r"kvtier: \S+ at (http://\S+)/v1")[1]


def complete(url: str, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Any:
    """Return the greedy completion of a prompt by the engine at ``url``: the whole response."""
    models = json.loads(fetch(f"{url}/v1/models"))
    body = {
        "model": models["data"][0]["id"],
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return json.loads(fetch(f"{url}/v1/completions", body | more))


class RunningNode:
    """A node's daemon and engines, with the same settings, in their own directory."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, str | int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment`` is added to the environment of its processes."""
        self.directory = directory
        self.environment = dict(environment or {})
        self.http_port = free_port()
        defaults: dict[str, str | int] = {
            "daemon.socket": str(directory / "k.sock"),
            "ssd.directory": str(directory / "ssd"),
            "ssd.capacity": "64MiB",
            "ssd.segment": "4MiB",
            "ssd.free_space_floor": "0",
            "cpu.capacity": "16MiB",
            "cpu.slab": "1MiB",
            "http.listen": f"127.0.0.1:{self.http_port}",
            "engine.listen": "127.0.0.1:0",
            "engine.pool": "4MiB",
            "client.lookup_deadline": "2s",  # on a busy machine, a late answer is a miss
            # Every block is written at once and everything is restored, so that tests know where
            # blocks are. Tests of decisions override this.
            "policy.eviction": "lru",
            "ssd.write": "store",
            "remote.write": "store",
            "cost.restore": "always",
            "cost.probe": "off",
        }
        self.settings = defaults | dict(settings or {})
        self.socket = Path(str(self.settings["daemon.socket"]))
        self._num_started = 0

    def arguments(self, **changes: str | int) -> list[str]:
        """Return the settings as options; ``changes`` have ``__`` for dots in keys."""
        settings = self.settings | {
            name.replace("__", "."): value for name, value in changes.items()
        }
        return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]

    def start(self, command: str, *more: str, **changes: str | int) -> Child:
        """Start ``kvtier COMMAND`` and return at once."""
        self._num_started += 1
        log_path = self.directory / f"{command}.{self._num_started}.log"
        words = kvtier_command(command, *self.arguments(**changes), *more)
        return Child(words, log_path, self.environment)

    def daemon(self, **changes: str | int) -> Child:
        """Start a daemon and wait until it is ready and has all its memory.

        It serves before that, but limits what it accepts to the memory it has so far.
        """
        with contextlib.ExitStack() as stack:  # stop it unless it becomes ready
            child = stack.enter_context(self.start("serve", **changes))
            child.await_log("event=ready")
            child.await_log('event="(arena reserved|arena smaller than configured)')
            stack.pop_all()
        return child

    def engine(self, model: Path, *more: str, **changes: str | int) -> tuple[Child, str]:
        """Start an engine and wait until it serves; return it with its URL."""
        with contextlib.ExitStack() as stack:
            words = ("--model", str(model), *more)
            child = stack.enter_context(self.start("engine", *words, **changes))
            url = url_of(child)
            stack.pop_all()
        return child, url

    def stat(self) -> Any:
        """Return the daemon's status document."""
        with self._stub() as stub:
            return json.loads(stub.Stat(pb.StatRequest(), timeout=_CALL_TIMEOUT_S).json)

    def explain(
        self,
        request_id: str = "",
        key_space: bytes = b"",
        hashes: Sequence[bytes] = (),
        *,
        tenant: bytes = b"",
        unsalted: Sequence[bytes] = (),
    ) -> Any:
        """Return the daemon's explanation of a request or chain; None if it has none."""
        request = pb.ExplainRequest(
            request_id=request_id,
            key_space=key_space,
            chain=engine_pb2.Chain(tenant=tenant, hashes=b"".join(hashes)),
            unsalted=engine_pb2.Chain(hashes=b"".join(unsalted)),
        )
        with self._stub() as stub:
            told = stub.Explain(request, timeout=_CALL_TIMEOUT_S).json
        return json.loads(told) if told else None

    def drop(self, *tiers: str) -> dict[str, int]:
        """Empty tiers; return the blocks each one lost. Fails if one kept some."""
        removed = self.drop_now(*tiers, deadline_ms=8000)
        for each in removed:
            assert not each.error, each
            assert not each.kept_blocks, each
        return dict(zip(tiers, (each.blocks for each in removed), strict=True))

    def drop_now(self, *tiers: str, deadline_ms: int = 1000) -> list[pb.DropReply.Removed]:
        """Empty tiers as far as they are unused; return the daemon's reply for each."""
        request = pb.DropRequest(
            tiers=[tier_to_wire(TierName(tier)) for tier in tiers], deadline_ms=deadline_ms
        )
        with self._stub() as stub:
            return list(stub.Drop(request, timeout=_CALL_TIMEOUT_S).removed)

    def fsck(self, *more: str) -> tuple[int, Any]:
        """Check the closed store; return the exit code and the report."""
        directory = str(self.settings["ssd.directory"])
        words = kvtier_command("fsck", "--directory", directory, "--json", *more)
        self._num_started += 1
        with Child(words, self.directory / f"fsck.{self._num_started}.log") as child:
            code = child.wait(_ANSWER_TIMEOUT_S)
            assert code in {0, 1}, child.log
            return code, json.loads(child.log.splitlines()[-1])

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the daemon's series of a name with these labels."""
        text = fetch(f"http://127.0.0.1:{self.http_port}/metrics").decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def await_idle(self, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
        """Wait until nothing is leased, pinned or in flight; return the status then."""

        def look() -> Any:
            document = self.stat()
            slow = [document["tiers"][name] for name in SLOW_TIERS]
            open_work = sum(
                tier.get(key, 0)
                for tier in slow
                for key in ("queued_reads", "queued_writes", "in_flight")
            )
            return None if document["leases"] + document["pins"] + open_work else document

        return await_true(look, "the node is idle", timeout_s)

    def await_state(self, tier: str, *states: str, timeout_s: float = _CALL_TIMEOUT_S) -> str:
        """Wait until a tier is in one of ``states``; return the reason."""

        def look() -> Any:
            document = self.stat()["tiers"][tier]
            return document if document["state"] in states else None

        document = await_true(look, f"the {tier} tier is {' or '.join(states)}", timeout_s)
        return str(document.get("reason", ""))

    def await_moved(self, route: str, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        """Wait until more bytes have gone over a route, such as ``cpu_to_ssd``."""

        def moved() -> float:
            return float(self.stat()["transfers"][route]["bytes"])

        before = moved()
        await_true(lambda: moved() > before, f"bytes go over {route}", timeout_s)

    def await_blocks(self, tier: str, num_blocks: int) -> Any:
        """Wait until a tier holds this many blocks and the node is idle."""

        def look() -> bool:
            blocks: int = self.stat()["tiers"][tier]["blocks"]
            return blocks == num_blocks

        await_true(look, f"{num_blocks} blocks in the {tier} tier")
        return self.await_idle()

    @contextlib.contextmanager
    def _stub(self) -> Iterator[operator_pb2_grpc.OperatorStub]:
        with local_operator(self.socket, _CALL_TIMEOUT_S) as stub:
            yield stub


def readiness(node: RunningNode) -> tuple[int, Any]:
    """Return the status and the document of the daemon's ``/readyz``."""
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()
