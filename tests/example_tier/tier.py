"""A tier of one file a block: its packed header and its payload. Full means full."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtier.core.identity import (
    HEADER_BYTES,
    PACKED_HEADER,
    BlockHash,
    BlockHeader,
    Headers,
    Selection,
)
from kvtier.core.residency import TierName
from kvtier.errors import TierError, TierFull
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    MissReason,
    Removed,
    Scrubbed,
    TierProperties,
    TierUsage,
    WriteOutcome,
    WriteReport,
)
from kvtier.tiers.check import check_header, check_payload, seconds_left


class DirectoryTier:
    """Blocks of any run are found again, in the order of their positions."""

    def __init__(self, directory: Path, capacity_bytes: int, name: TierName) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.properties = TierProperties(name, is_persistent=True, is_shared=False, num_workers=2)
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._sizes = {
            BlockHash(bytes.fromhex(path.name)): path.stat().st_size
            for path in directory.iterdir()
            if not path.suffix and path.is_file()
        }

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        with self._ready(deadline_ns):
            return WriteReport(tuple(map(self._keep, blocks)))

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        with self._ready(deadline_ns):
            return [self._fetch(block) for block in blocks]

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool]:
        with self._ready(deadline_ns):
            return [each in self._sizes for each in hashes]

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        with self._ready(deadline_ns):
            sizes = [self._forget(each) for each in dict.fromkeys(hashes) if each in self._sizes]
        return Removed(len(sizes), sum(sizes))

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        with self._ready(deadline_ns):
            meant = [
                header.block_hash
                for header in self._stored()
                if selection.has(header.key_space, header.tenant)
            ]
            sizes = [self._forget(each) for each in meant]
        return Removed(len(sizes), sum(sizes))

    def health_check(self, deadline_ns: int) -> None:
        with self._ready(deadline_ns):
            next(self._directory.iterdir(), None)

    @contextlib.contextmanager
    def scratch(
        self, block_bytes: int, num_blocks: int, deadline_ns: int
    ) -> Iterator["DirectoryTier"]:
        num_bytes = num_blocks * (HEADER_BYTES + block_bytes)
        with self._ready(deadline_ns):
            if sum(self._sizes.values()) + num_bytes > self._capacity_bytes:
                raise TierFull(f"{num_bytes} bytes are not free")
        scratch = DirectoryTier(self._directory / "scratch.d", num_bytes, self.properties.name)
        try:
            yield scratch
        finally:
            scratch.purge(Selection(), 1 << 62)

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        return Scrubbed()

    def health(self) -> Health:
        return Health()

    def headers(self) -> Iterator[Headers]:
        with self._lock:
            headers = self._stored()
        yield np.frombuffer(b"".join(header.pack() for header in headers), PACKED_HEADER)

    def usage(self) -> TierUsage:
        sizes = list(self._sizes.values())
        return TierUsage(len(sizes), sum(sizes), self._capacity_bytes)

    def close(self) -> None:
        """Every block is in its file already."""

    @contextlib.contextmanager
    def _ready(self, deadline_ns: int) -> Iterator[None]:
        seconds_left(deadline_ns)
        try:
            with self._lock:
                yield
        except OSError as error:
            raise TierError(str(error)) from error

    def _path(self, block_hash: BlockHash) -> Path:
        return self._directory / block_hash.hex()

    def _keep(self, block: BlockWrite) -> WriteOutcome:
        block_hash, size = block.header.block_hash, HEADER_BYTES + len(block.payload)
        if block_hash in self._sizes:
            return WriteOutcome.STORED
        if sum(self._sizes.values()) + size > self._capacity_bytes:
            return WriteOutcome.REJECTED
        part = self._path(block_hash).with_suffix(".part")
        part.write_bytes(block.header.pack() + bytes(block.payload))
        part.rename(self._path(block_hash))
        self._sizes[block_hash] = size
        return WriteOutcome.STORED

    def _fetch(self, wanted: BlockRead) -> BlockHeader | MissReason:
        if wanted.block_hash not in self._sizes:
            return MissReason.ABSENT
        stored = self._path(wanted.block_hash).read_bytes()
        result = check_header(wanted, stored[:HEADER_BYTES])
        if isinstance(result, BlockHeader):
            result = check_payload(result, memoryview(stored)[HEADER_BYTES:])
            wanted.into[: wanted.payload_bytes] = stored[HEADER_BYTES:]
        if result in {MissReason.HEADER, MissReason.CHECKSUM}:
            self._forget(wanted.block_hash)
        return result

    def _stored(self) -> list[BlockHeader]:
        headers = []
        for block_hash in self._sizes:
            with self._path(block_hash).open("rb") as file:
                headers.append(BlockHeader.unpack(file.read(HEADER_BYTES)))
        return sorted(headers, key=lambda header: header.position)

    def _forget(self, block_hash: BlockHash) -> int:
        self._path(block_hash).unlink(missing_ok=True)
        return self._sizes.pop(block_hash) - HEADER_BYTES
