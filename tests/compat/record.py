"""Write what this version keeps and says into golden/, for all later versions to read.

    .venv/bin/python -m tests.compat.record

Run it once for each new number: of the protocol, of segments, or of the block header. What is there
already is never written anew: it is what a release in the field has written.
"""

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.core.identity import HEADER_BYTES
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.tiers.redis.value import HEAD_BYTES
from kvtier.tiers.seal import Stamp
from kvtier.tiers.ssd import segment
from tests.compat.surface import GOLDEN, surface_of_protocol
from tests.integration.pattern import PatternEngine, key_space
from tests.integration.redis_child import RedisServer

SPACE = key_space(block_bytes=1024)
PROMPT, NUM_BLOCKS = 7, 2
WRITTEN_S = 1_735_689_600
SETTINGS: dict[str, str | int] = {"ssd.segment": "1MiB", "remote.min_tokens": 0}


def main() -> None:
    """Write the files that are missing."""
    surface = surface_of_protocol()
    _write(f"protocol-{surface['protocol']}.json", _as_json(surface))
    with work_directory() as directory:
        server = RedisServer(directory)
        node = RunningNode(directory, SETTINGS | {"remote.url": server.url})
        with server.start():
            with node.daemon() as daemon, PatternEngine(node.socket, SPACE) as engine:
                assert engine.store(PROMPT, NUM_BLOCKS) == NUM_BLOCKS
                for tier in ("ssd", "remote"):
                    node.await_blocks(tier, NUM_BLOCKS)
                await_true((node.directory / "ssd" / "key_spaces.json").exists, "names are noted")
                assert daemon.stop() == 0
            with server.client() as client:
                keys = client.keys("kvtier:*")
                values = {key.decode(): _of_2025(client.get(key)).hex() for key in keys}
        store = node.directory / "ssd"
        _write(f"segment-{segment._FORMAT_VERSION}.tar.gz", _packed(store))
        _write(f"header-{surface['header']}.json", _as_json(values))


def _of_2025(value: bytes) -> bytes:
    """Return a value as written then: it must not be of the future where a clock is behind ours."""
    stamp = Stamp.unpack(value[HEADER_BYTES:HEAD_BYTES])
    assert stamp is not None
    return value[:HEADER_BYTES] + replace(stamp, written_s=WRITTEN_S).pack() + value[HEAD_BYTES:]


def _as_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


def _packed(directory: Path) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(directory.iterdir()):
            if path.suffix in {".segment", ".json"}:
                archive.add(path, path.name)
    return packed.getvalue()


def _write(name: str, content: bytes) -> None:
    path = GOLDEN / name
    if path.exists():
        print(f"{name} is there already, and stays")
        return
    path.write_bytes(content)
    print(f"{name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
