"""A Redis server that a test may freeze and kill."""

from pathlib import Path

import redis

from kvtier.testing.child import Child, await_true, free_port


class RedisServer:
    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory

    def start(self) -> Child:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory)]
        child = Child(command, self._directory / "redis.log")
        await_true(self._answers, "the server answers")
        return child

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False
