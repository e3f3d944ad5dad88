"""A Redis server that a test may freeze, kill and talk to behind the tier's back."""

from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvtier.testing.child import Child, await_true, free_port
from tests.programs import redis_program


class RedisServer:
    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory

    def start(self, *options: str) -> Child:
        """Start it, or start it again; it answers, though maybe only that it is not ready."""
        command = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory), *options]
        child = Child(command, self._directory / "redis.log")
        try:
            await_true(self._answers, "the server answers")
        except AssertionError:
            child.kill()
            raise
        return child

    def client(self) -> redis.Redis:
        once = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, socket_timeout=10, protocol=2, retry=once)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except (redis.AuthenticationError, redis.BusyLoadingError):
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
