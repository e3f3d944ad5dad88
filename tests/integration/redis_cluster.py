"""A Redis Cluster of six nodes on loopback, any of which a test may kill."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.testing.child import Child, await_true, free_port
from tests.programs import redis_program

NODE_TIMEOUT_MS = 1000
"""How long a node may be silent before the others hold it for dead."""


class RedisCluster:
    """Three primaries with a replica each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.ports = [free_port() for _ in range(6)]
        self._bus_ports = [free_port() for _ in range(6)]
        self._children: dict[int, Child] = {}
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        """Name two of the nodes: the others are found."""
        return f"redis+cluster://127.0.0.1:{self.ports[0]},127.0.0.1:{self.ports[5]}"

    @contextlib.contextmanager
    def running(self) -> Iterator["RedisCluster"]:
        with self._stack:
            for port in self.ports:
                self.start(port)
            for port in self.ports:
                await_true(lambda port=port: self.ask(port, "PING"), "a node answers")
            self._form()
            self.await_whole()
            yield self

    def child(self, port: int) -> Child:
        return self._children[port]

    def start(self, port: int) -> None:
        """Start a node, or start it again."""
        self._children[port] = self._stack.enter_context(self._started(port))

    def ask(self, port: int, *words: str | int) -> object:
        """Return the reply of one node, or None where it does not answer."""
        once = Retry(NoBackoff(), 0)
        with (
            redis.Redis(port=port, socket_timeout=2, protocol=2, retry=once) as client,
            contextlib.suppress(redis.RedisError),
        ):
            return client.execute_command(*words)
        return None

    def name(self, port: int) -> str:
        """Return how a node is called in its cluster."""
        answer = await_true(lambda: self.ask(port, "CLUSTER MYID"), "a node tells its name")
        assert isinstance(answer, bytes)
        return answer.decode()

    def primaries(self) -> list[int]:
        """Return the ports of the nodes that hold themselves for primaries."""
        roles = {port: self.ask(port, "ROLE") for port in self.ports}
        return [p for p, role in roles.items() if isinstance(role, list) and role[0] == b"master"]

    def slots(self, port: int) -> dict[tuple[int, int], int]:
        """Return which primary has which slots, as the node at ``port`` sees it."""
        answer = await_true(lambda: self.ask(port, "CLUSTER SLOTS"), "a node tells its slots")
        assert isinstance(answer, list)
        return {(first, last): primary[1] for first, last, primary, *_ in answer}

    def await_whole(self, timeout_s: float = 30) -> None:
        """Wait until every node says that all slots are served, and every replica is in step."""

        def is_whole() -> bool:
            alive = [port for port in self.ports if self._children[port].is_running]
            facts = [self.ask(port, "CLUSTER INFO") for port in alive]
            roles = [self.ask(port, "ROLE") for port in alive]
            links = [role[3] for role in roles if isinstance(role, list) and role[0] == b"slave"]
            return all(
                isinstance(fact, dict) and fact["cluster_state"] == "ok" for fact in facts
            ) and all(link == b"connected" for link in links)

        await_true(is_whole, "the cluster is whole", timeout_s)

    def _form(self) -> None:
        """Introduce the nodes to each other, and give each of three primaries a replica."""
        primaries, replicas = self.ports[:3], self.ports[3:]
        for epoch, (port, bus) in enumerate(zip(self.ports, self._bus_ports, strict=True)):
            assert self.ask(port, "CLUSTER", "SET-CONFIG-EPOCH", epoch + 1)
            assert self.ask(primaries[0], "CLUSTER", "MEET", "127.0.0.1", port, bus)
        for port, first, last in zip(
            primaries, (0, 5461, 10923), (5460, 10922, 16383), strict=True
        ):
            assert self.ask(port, "CLUSTER", "ADDSLOTSRANGE", first, last)
        for primary, replica in zip(primaries, replicas, strict=True):
            name = self.name(primary)
            follow = ("CLUSTER", "REPLICATE", name)
            await_true(
                lambda replica=replica, words=follow: self.ask(replica, *words), "it follows"
            )

    def _started(self, port: int) -> Child:
        directory = self._directory / str(port)
        directory.mkdir(exist_ok=True)
        bus = self._bus_ports[self.ports.index(port)]
        command = [redis_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        command += ["--dir", str(directory), "--cluster-enabled", "yes", "--cluster-port", str(bus)]
        command += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--repl-diskless-sync-delay"]
        command += ["0", "--cluster-require-full-coverage", "no", "--repl-ping-replica-period", "1"]
        return Child(command, directory / "redis.log")
