"""A daemon with the CPU tier alone starts in this process, is ready, and closes everything."""

import asyncio
import gc
import socket
import tempfile
from pathlib import Path

from kvtier.config.load import load_config
from kvtier.daemon.daemon import Daemon


def test_a_daemon_starts_and_ends() -> None:
    with tempfile.TemporaryDirectory(prefix="kvtier") as directory:  # short enough for a socket
        start_and_end(Path(directory) / "k.sock")
    gc.unfreeze()


def start_and_end(path: Path) -> None:
    overrides = {
        "daemon.socket": str(path),
        "cpu.capacity": "16MiB",
        "cpu.slab": "16MiB",
        "ssd.enabled": "false",
        "http.listen": "",
    }
    daemon = Daemon(load_config(None, overrides, {}))

    async def scenario() -> None:
        async with daemon.serving():
            assert daemon.metrics.registry.get_sample_value("kvtier_ready") == 1
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))

    asyncio.run(scenario())
    assert daemon.metrics.registry.get_sample_value("kvtier_ready") == 0
    assert not path.exists()
