"""RedisTier: blocks in Redis or Valkey servers that several nodes share.

Rules
-----
* Nothing connects before the first call: a missing server never delays a start.
* Every wait ends by the deadline of its call, including connecting and name resolution.
* Each batch takes one round trip per server, with a bounded number of bytes in flight.
* Values that others wrote under our keys are never trusted: header, length, checksum or seal are
  verified, and a value that is not a complete block of its hash is unlinked.
* If one of several servers fails, only its own blocks are affected: they are absent or rejected,
  and the rest of the batch is served. A call fails only if every server fails.
* No message or repr contains credentials.
"""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvtier.certificate import Certificates
from kvtier.core.identity import HASH_BYTES, BlockHash, BlockHeader, Headers, Selection
from kvtier.core.residency import TierName
from kvtier.errors import StartError, TierError
from kvtier.secret import Secret
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    HealthState,
    MissReason,
    Removed,
    Scrubbed,
    TierProperties,
    TierUsage,
    WriteOutcome,
    WriteReport,
)
from kvtier.tiers.check import seconds_left
from kvtier.tiers.redis.address import Form, RedisAddress, ServerAddress
from kvtier.tiers.redis.connection import Connector
from kvtier.tiers.redis.server import Server
from kvtier.tiers.redis.server_batch import FanOut, ServerBatch
from kvtier.tiers.redis.topology import Topology
from kvtier.tiers.redis.unlink import purge, unlink
from kvtier.tiers.redis.value import HEAD_BYTES, ValueFormat
from kvtier.tiers.seal import Seal, SealMode

__all__ = ["RedisOptions", "RedisTier"]


def _unsealed() -> Seal:
    return Seal(SealMode.OFF, None, "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """Options of a ``RedisTier``, named as in the configuration."""

    key_prefix: str = "kvtier:"
    ttl_s: float = 86_400
    timeout_s: float = 0.25
    """How long a server may be silent, and connecting may take."""
    num_workers: int = 4
    """Connections to each server."""
    value_bytes: int = 1 << 20
    """Payload of one value; the first value of a block also has its head."""
    max_age_s: float = 0
    """Blocks written longer ago are not served; 0: no limit."""
    tls_ca: Path | None = None
    seal: Seal = field(default_factory=_unsealed)
    now_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.ttl_s < 0.001:
            raise StartError(
                "remote.ttl", f"{self.ttl_s} s is not a valid time to live", "set 1ms or more"
            )
        if {"{", "}"} & set(self.key_prefix):
            raise StartError(
                "remote.key_prefix",
                "it contains a brace, which selects cluster slots",
                "remove the braces",
            )


S = TypeVar("S")
T = TypeVar("T")

_VALUE_BYTES_MAX = 512 << 20
"""Largest value that a server accepts by default."""

_SCRATCH_TTL_MS = 60_000
"""Expiry of a benchmark's blocks, so that those left by a crash disappear after a minute."""

_SAMPLES = 256
"""Hashes from which a health check picks one for each primary."""


class RedisTier:
    """Blocks at ``url``; see ``RedisAddress`` for its forms. Raises StartError for a bad one."""

    def __init__(self, url: str, options: RedisOptions | None = None) -> None:
        options = options or RedisOptions()
        self.properties = TierProperties(
            TierName.REMOTE,
            is_persistent=True,
            is_shared=True,
            num_workers=options.num_workers,
        )
        self._options = options
        self._address = RedisAddress.parse(url)
        self._values = ValueFormat(
            options.key_prefix.encode(),
            min(options.value_bytes, _VALUE_BYTES_MAX - HEAD_BYTES),
            int(options.ttl_s * 1000),
            options.max_age_s,
            options.seal,
        )
        connector = Connector(self._address, options.timeout_s, options.tls_ca)
        self._connector = connector

        def open_server(place: ServerAddress) -> Server:
            return Server(
                place,
                connector,
                options.timeout_s,
                options.num_workers,
                is_alone=self._address.form is not Form.CLUSTER,
                on_restart=self._note_change,
            )

        self._topology = Topology(self._address, connector, open_server, self._note_change)
        self._fan_out = FanOut(4 * options.num_workers)
        self._lock = threading.Lock()
        self._num_faults = 0
        self._generation = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"RedisTier({self._address})"

    def tune(self, ttl_s: float, max_age_s: float) -> None:
        """Change expiry and maximum age. Stored values keep their expiry until they are renewed."""
        self._values.ttl_ms = int(ttl_s * 1000)
        self._values.max_age_s = max_age_s

    @property
    def authorities(self) -> Secret[Certificates] | None:
        """Return the certificate authorities, to be reloaded when their file changes."""
        return self._connector.authorities

    def change_login(self, url: str) -> None:
        """Use the login of a URL of the same servers for new connections."""
        address = RedisAddress.parse(url)
        assert address.differs_only_in_login(self._address), "other servers are another tier"
        self._connector.address = address

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Set absent blocks and renew the others."""
        hashes = [block.header.block_hash for block in blocks]
        outcomes = self._call_servers(
            hashes, deadline_ns, WriteOutcome.REJECTED, ServerBatch.write, blocks
        )
        return WriteReport(tuple(outcomes))

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read and verify blocks; values that are no longer usable are unlinked."""
        hashes = [block.block_hash for block in blocks]
        absent: BlockHeader | MissReason = MissReason.ABSENT
        return self._call_servers(hashes, deadline_ns, absent, ServerBatch.read, blocks)

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool | None]:
        """Ask the servers for the head of each block; None if a block's server does not answer."""
        unknown: bool | None = None
        return self._call_servers(hashes, deadline_ns, unknown, ServerBatch.contains, hashes)

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Unlink blocks for all nodes. Raises TierError if some could not be unlinked."""
        removed = Removed()
        for server, indexes in self._parts(hashes, deadline_ns).items():
            if server is None:
                raise TierError("remote: no server owns the slots of some blocks")
            heads = dict.fromkeys(self._values.key(hashes[index]) for index in indexes)
            removed += unlink(server, list(heads), deadline_ns)
        return removed

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Unlink the blocks of a selection on every primary, including those of other nodes.

        Walks all keys under the prefix with SCAN, a bounded number at a time. Raises TierTimeout at
        the deadline. Raises TierError for a server that fails or refuses, after all servers were
        asked; removed blocks stay removed.
        """
        removed = Removed()
        faults: list[TierError] = []
        for server in self._primaries(deadline_ns):
            try:
                removed += purge(server, self._values.prefix, selection, deadline_ns)
            except TierError as error:
                faults.append(error)
        if faults:
            self._topology.report()
            raise faults[0]
        return removed

    def health_check(self, deadline_ns: int) -> None:
        """Ask each primary whether it would accept a block. Raises TierError if none answers."""
        faults: list[TierError] = []
        servers = self._primaries(deadline_ns)
        samples = [BlockHash(number.to_bytes(HASH_BYTES, "big")) for number in range(_SAMPLES)]
        parts = self._parts(samples, deadline_ns)
        for server in servers:
            sample = samples[parts.get(server, [0])[0]]
            try:
                self._exchange(server, deadline_ns).check(sample)
            except TierError as error:
                faults.append(error)
        if faults:
            self._topology.report()
        if len(faults) == len(servers):
            raise faults[0]

    @contextlib.contextmanager
    def scratch(self, block_bytes: int, num_blocks: int, deadline_ns: int) -> Iterator["RedisTier"]:
        """Yield this tier with a short expiry. Raises TierFull if a primary lacks free memory."""
        for server in self._primaries(deadline_ns):
            self._exchange(server, deadline_ns).check_room(num_blocks * block_bytes)
        scratch = copy.copy(self)
        scratch._values = replace(self._values, ttl_ms=_SCRATCH_TTL_MS)
        yield scratch

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Do nothing: the server is shared, and its blocks are verified when they are read."""
        return Scrubbed()

    def health(self) -> Health:
        """Return the health of the servers as of their last calls."""
        servers = self._topology.known
        faults = [server.fault for server in servers if server.fault]
        limits = [server.limit for server in servers if server.limit]
        if not servers and self._topology.fault:
            return Health(HealthState.OUT, self._topology.fault)
        if faults and len(faults) == len(servers):
            return Health(HealthState.OUT, faults[0])
        if faults:
            reason = f"{len(faults)} of {len(servers)} primaries are out: {faults[0]}"
            return Health(HealthState.DEGRADED, reason)
        return Health(HealthState.DEGRADED, limits[0]) if limits else Health()

    def headers(self) -> Iterator[Headers]:
        """Yield nothing: other nodes change what the servers hold."""
        return iter(())

    def usage(self) -> TierUsage:
        """Return zeros for blocks and bytes, which only the servers know."""
        return TierUsage(
            0,
            0,
            0,
            {"server": str(self._address), "partial_faults": self._num_faults},
            self._generation,
        )

    def close(self) -> None:
        """Close the connections; running calls fail. Idempotent."""
        self._is_closed = True
        self._topology.close()
        self._fan_out.close()  # queued steps still run and fail at once

    def _exchange(self, server: Server, deadline_ns: int) -> ServerBatch:
        return ServerBatch(server, self._values, self._options.now_s(), deadline_ns)

    def _primaries(self, deadline_ns: int) -> Sequence[Server]:
        self._check_open(deadline_ns)
        return self._topology.primaries(deadline_ns)

    def _parts(
        self, hashes: Sequence[BlockHash], deadline_ns: int
    ) -> dict[Server | None, list[int]]:
        """Return the indexes of the blocks of each server."""
        self._check_open(deadline_ns)
        if not hashes:
            return {}
        parts: dict[Server | None, list[int]] = {}
        owners = self._topology.owners(map(self._values.key, hashes), deadline_ns)
        for index, server in enumerate(owners):
            parts.setdefault(server, []).append(index)
        return parts

    def _call_servers(
        self,
        hashes: Sequence[BlockHash],
        deadline_ns: int,
        fallback: T,
        operation: Callable[[ServerBatch, Sequence[S]], list[T]],
        blocks: Sequence[S],
    ) -> list[T]:
        """Let each server handle its part in parallel; ``fallback`` for those of failed servers.

        Raises the fault if every part failed, unless other servers of the cluster are available.
        """
        parts = self._parts(hashes, deadline_ns)
        steps = [
            partial(
                self._call_server,
                server,
                deadline_ns,
                operation,
                [blocks[index] for index in indexes],
            )
            for server, indexes in parts.items()
        ]
        results = [fallback] * len(blocks)
        faults: list[TierError] = []
        for indexes, answer in zip(parts.values(), self._fan_out.run(steps), strict=True):
            if isinstance(answer, TierError):
                faults.append(answer)
                self._count_fault(len(indexes))
                continue
            for index, outcome in zip(indexes, answer, strict=True):
                results[index] = outcome
        if faults and len(faults) == len(parts) and not self._is_partial(parts):
            raise faults[0]
        return results

    def _call_server(
        self,
        server: Server | None,
        deadline_ns: int,
        operation: Callable[[ServerBatch, Sequence[S]], list[T]],
        part: Sequence[S],
    ) -> list[T]:
        if server is None:
            self._topology.report()
            raise TierError("remote: no server owns the slots of some blocks")
        if server.fault and self._topology.changes:
            self._topology.report()
            raise TierError(f"remote: not retried yet after a fault: {server.fault}")
        exchange = self._exchange(server, deadline_ns)
        try:
            return operation(exchange, part)
        finally:
            if server.fault or server.is_replica or exchange.has_moved:
                self._topology.report()

    def _is_partial(self, parts: Iterable[Server | None]) -> bool:
        """Return whether the called servers are down while others of the cluster are not."""
        are_out = all(server is None or server.fault for server in parts)
        return are_out and any(not server.fault for server in self._topology.known)

    def _count_fault(self, num_blocks: int) -> None:
        with self._lock:
            self._num_faults += num_blocks

    def _note_change(self) -> None:
        """Note that servers may have lost blocks."""
        with self._lock:
            self._generation += 1

    def _check_open(self, deadline_ns: int) -> None:
        seconds_left(deadline_ns)
        if self._is_closed:
            raise TierError("the remote tier is closed")
