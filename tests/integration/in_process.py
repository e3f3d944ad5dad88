"""A daemon on a thread of this process, for tests that hold on to its tiers."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.config import Config
from kvtier.daemon.daemon import Daemon
from kvtier.tiers.breaker import BreakerTier


@contextmanager
def running(config: Config, make: Callable[[], BreakerTier]) -> Iterator[asyncio.AbstractEventLoop]:
    """Run a daemon with that tier for its SSD; yields its loop."""
    begun, failed = threading.Event(), list[BaseException]()
    loop = asyncio.new_event_loop()
    stopping = asyncio.Event()

    async def serve() -> None:
        daemon = Daemon(config, open_tier=lambda _config, _name: make())
        async with daemon.serving():
            begun.set()
            await stopping.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            failed.append(error)
            begun.set()
        finally:
            loop.close()

    thread = threading.Thread(target=run, name="in-process")
    thread.start()
    try:
        assert begun.wait(30)
        assert not failed, failed
        yield loop
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
        assert not thread.is_alive()
        assert not failed, failed
