"""RemoteTier: blocks in a Redis or Valkey server that several nodes share.

One value a block: the packed header, then the payload. The key is the prefix and the block hash in
hex, which already separates models, layouts and tenants. Every value has a time to live; storing a
block that is there renews it.

Rules
-----
* Nothing connects before the first call: a missing server never delays a start.
* Batches are bounded in bytes and commands. The server may be silent for ``timeout_s``, or until
  the deadline if that is sooner; making a connection may take ``timeout_s`` more.
* What others wrote under our keys is never trusted: header, length and checksum are verified, and a
  value that is no whole block of that hash is unlinked.
* A reply that says the server is full rejects the block; any other error is the medium's.
* Credentials are in no message and no repr.
"""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

from redis.backoff import NoBackoff
from redis.connection import BlockingConnectionPool
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kvtier.core.identity import (
    HASH_BYTES,
    HEADER_BYTES,
    BlockHash,
    BlockHeader,
    HeaderError,
    Headers,
    Selection,
)
from kvtier.core.residency import TierName
from kvtier.errors import StartError, TierError, TierTimeout
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

__all__ = ["RemoteTier"]

T = TypeVar("T")

_BATCH_BYTES_MAX = 16 << 20
"""Payload of one round trip: large enough to hide its latency, small beside a server's buffers."""

_BATCH_COMMANDS_MAX = 512
"""Commands of one round trip: a server serves nobody else meanwhile."""

_VALUE_BYTES_MAX = 512 << 20
"""The largest value a server takes in its default setting."""


class _Link(Protocol):
    """What we use of the library's connection, which it leaves untyped."""

    _sock: socket.socket

    def pack_commands(self, commands: Sequence[tuple[object, ...]]) -> list[bytes]: ...
    def send_packed_command(self, command: list[bytes]) -> None: ...
    def read_response(self) -> object: ...
    def disconnect(self) -> None: ...


class _Links(Protocol):
    """What we use of its pool of connections."""

    def get_connection(self) -> _Link: ...
    def release(self, connection: _Link) -> None: ...
    def disconnect(self) -> None: ...


class RemoteTier:
    """Blocks at ``url``: ``redis://``, ``rediss://`` or ``unix://``, with user and password."""

    def __init__(
        self,
        url: str,
        *,
        key_prefix: str = "kvtier:",
        ttl_s: float = 86_400,
        timeout_s: float = 0.25,
        num_workers: int = 4,
    ) -> None:
        self.properties = TierProperties(
            TierName.REMOTE, is_persistent=True, is_shared=True, num_workers=num_workers
        )
        if ttl_s < 0.001:
            raise StartError("remote.ttl", f"{ttl_s} s is no time to live", "set one from 1ms up")
        self._prefix = key_prefix.encode()
        self._ttl_ms = int(ttl_s * 1000)
        self._timeout_s = timeout_s
        self._pool, self._where = _open_pool(url, timeout_s, num_workers)
        self._is_closed = False

    def __repr__(self) -> str:
        return f"RemoteTier({self._where})"

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Set the blocks that are not there, and renew the others."""
        outcomes: list[WriteOutcome] = []
        for batch in _batches(blocks, lambda block: len(block.payload)):
            keys = [self._key(block.header.block_hash) for block in batch]
            renewals = [("PEXPIRE", key, self._ttl_ms) for key in keys]
            present = [bool(reply) for reply in self._ask(renewals, deadline_ns)]
            sets = [
                ("SET", key, block.header.pack() + block.payload, "PX", self._ttl_ms)
                for key, block, is_there in zip(keys, batch, present, strict=True)
                if not (is_there or _is_too_large(block))
            ]
            replies = iter(self._ask(sets, deadline_ns, allowed=OutOfMemoryError))
            for block, is_there in zip(batch, present, strict=True):
                is_stored = is_there or (not _is_too_large(block) and next(replies) == b"OK")
                outcomes.append(WriteOutcome.STORED if is_stored else WriteOutcome.REJECTED)
        return WriteReport(tuple(outcomes))

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Fetch blocks, checked; values that are damaged are unlinked."""
        results: list[BlockHeader | MissReason] = []
        damaged: list[BlockHash] = []
        for batch in _batches(blocks, lambda block: block.payload_bytes):
            keys = [self._key(block.block_hash) for block in batch]
            (values,) = self._ask([("MGET", *keys)], deadline_ns)
            for wanted, value in zip(batch, cast("list[bytes | None]", values), strict=True):
                result = MissReason.ABSENT if value is None else _unpack(wanted, value)
                results.append(result)
                is_refused = value is not None and isinstance(result, MissReason)
                if is_refused and not _is_whole(wanted.block_hash, value or b""):
                    damaged.append(wanted.block_hash)
        if damaged:
            self._ask([("UNLINK", *map(self._key, damaged))], deadline_ns)
        return results

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> list[bool]:
        """Ask the server for each hash."""
        present: list[bool] = []
        for batch in _batches(hashes, lambda _: 0):
            replies = self._ask([("EXISTS", self._key(each)) for each in batch], deadline_ns)
            present += [bool(reply) for reply in replies]
        return present

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Unlink blocks, for every node."""
        return self._unlink([self._key(each) for each in dict.fromkeys(hashes)], deadline_ns)

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Unlink the blocks of a selection under the prefix, also other nodes'.

        Walks all keys of the server with SCAN, a bounded number at a time. Raises TierTimeout at
        the deadline, with what was removed until then removed.
        """
        pattern = re.compile(re.escape(self._prefix) + b"[0-9a-f]{%d}" % (2 * HASH_BYTES))
        glob = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        num_blocks = num_bytes = 0
        cursor = b"0"
        while True:
            scan = ("SCAN", cursor, "MATCH", glob, "COUNT", _BATCH_COMMANDS_MAX)
            (reply,) = self._ask([scan], deadline_ns)
            cursor, keys = cast("tuple[bytes, list[bytes]]", reply)
            ours = [key for key in keys if pattern.fullmatch(key)]
            if not selection.is_all:
                ours = self._selected(ours, selection, deadline_ns)
            removed = self._unlink(ours, deadline_ns)
            num_blocks += removed.num_blocks
            num_bytes += removed.num_bytes
            if cursor == b"0":
                return Removed(num_blocks, num_bytes)

    def probe(self, deadline_ns: int) -> None:
        """Ask the server whether it is there."""
        self._ask([("PING",)], deadline_ns)

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Verify nothing: the server is shared, and what it holds is verified when it is read."""
        return Scrubbed()

    def health(self) -> Health:
        """Return that nothing is known against it."""
        return Health()

    def headers(self) -> Iterator[Headers]:
        """Yield nothing: what the server holds changes without us."""
        return iter(())

    def usage(self) -> TierUsage:
        """Return zeros: only the server knows."""
        return TierUsage(0, 0, 0, {"server": self._where})

    def close(self) -> None:
        """End the connections."""
        self._is_closed = True
        self._pool.disconnect()

    def _key(self, block_hash: BlockHash) -> bytes:
        return self._prefix + block_hash.hex().encode()

    def _selected(self, keys: list[bytes], selection: Selection, deadline_ns: int) -> list[bytes]:
        """Return those of ``keys`` whose values say that they are of a selection."""
        chosen: list[bytes] = []
        for batch in _batches(keys, lambda _: HEADER_BYTES):
            starts = [("GETRANGE", key, 0, HEADER_BYTES - 1) for key in batch]
            for key, packed in zip(batch, self._ask(starts, deadline_ns), strict=True):
                with contextlib.suppress(HeaderError):
                    header = BlockHeader.unpack(cast("bytes", packed))
                    if selection.has(header.key_space, header.tenant):
                        chosen.append(key)
        return chosen

    def _unlink(self, keys: list[bytes], deadline_ns: int) -> Removed:
        num_blocks = num_bytes = 0
        for batch in _batches(keys, lambda _: 0):
            lengths = self._ask([("STRLEN", key) for key in batch], deadline_ns)
            replies = self._ask([("UNLINK", key) for key in batch], deadline_ns)
            for length, was_there in zip(lengths, replies, strict=True):
                num_blocks += cast("int", was_there)
                num_bytes += max(0, cast("int", length) - HEADER_BYTES) * cast("int", was_there)
        return Removed(num_blocks, num_bytes)

    def _ask(
        self,
        commands: Sequence[tuple[object, ...]],
        deadline_ns: int,
        *,
        allowed: type[ResponseError] | None = None,
    ) -> list[object]:
        """Send commands in one round trip; error replies of the allowed kind are returned."""
        seconds_left(deadline_ns)
        if self._is_closed:
            raise TierError("the remote tier is closed")
        if not commands:
            return []
        try:
            with self._connected(deadline_ns) as connection:
                connection.send_packed_command(connection.pack_commands(commands))
                return [_reply(connection, allowed) for _ in commands]
        except RedisTimeoutError:
            raise TierTimeout(f"remote: no answer from {self._where} in time") from None
        except RedisError as error:
            # The class says enough; the text of an error may quote what was sent.
            raise TierError(f"remote: {type(error).__name__} from {self._where}") from None

    @contextlib.contextmanager
    def _connected(self, deadline_ns: int) -> Iterator[_Link]:
        """Borrow a connection; one that failed half way through is not used again."""
        connection = self._pool.get_connection()
        try:
            # The library has one timeout for all calls, and ours have a deadline each.
            timeout_s = min(self._timeout_s, seconds_left(deadline_ns))
            connection._sock.settimeout(timeout_s)
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)


def _reply(connection: _Link, allowed: type[ResponseError] | None) -> object:
    """Read one reply; an error of the allowed kind is returned."""
    try:
        return connection.read_response()
    except ResponseError as error:
        if allowed is None or not isinstance(error, allowed):
            raise
        return error


def _open_pool(url: str, timeout_s: float, num_workers: int) -> tuple["_Links", str]:
    """Return connections that are not made yet, and how to call the server in messages.

    Credentials are cut out of the URL here, so that any character may stand in a password.
    """
    scheme, _, rest = url.partition("://")
    credentials, _, place = rest.rpartition("@")
    username, _, password = credentials.partition(":")
    bare = f"{scheme}://{place}"
    try:
        pool = BlockingConnectionPool.from_url(
            bare,
            max_connections=num_workers,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # A link that was dropped while it was idle is noticed and made anew by the pool. Trying
            # again after anything else would only double the time that a dead server costs.
            retry=Retry(NoBackoff(), 0),
            # In pieces of the default 64 KiB, a value of 3 MB is read a quarter slower.
            socket_read_size=1 << 20,
            protocol=2,
            username=unquote(username) or None,
            password=unquote(password) or None,
        )
        parts = urlsplit(bare)
    except ValueError:
        raise StartError(
            "remote.url",
            "not a URL of a Redis server",
            "write redis://, rediss:// or unix://, then user:password@ if any, host and port",
        ) from None
    return cast("_Links", pool), f"{scheme}://{parts.netloc}{parts.path}"


def _batches(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    batch_bytes = 0
    for item in items:
        size_bytes = size_of(item)
        is_full = batch_bytes + size_bytes > _BATCH_BYTES_MAX or len(batch) == _BATCH_COMMANDS_MAX
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += size_bytes
    if batch:
        yield batch


def _is_too_large(block: BlockWrite) -> bool:
    return HEADER_BYTES + len(block.payload) > _VALUE_BYTES_MAX


def _unpack(wanted: BlockRead, value: bytes) -> BlockHeader | MissReason:
    header = check_header(wanted, value)
    if isinstance(header, MissReason):
        return header
    payload = memoryview(value)[HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        return MissReason.LENGTH
    wanted.into[: header.payload_bytes] = payload
    return check_payload(header, wanted.into[: header.payload_bytes])


def _is_whole(block_hash: BlockHash, value: bytes) -> bool:
    """Tell whether a value is an intact block of that hash, only not the one that was asked for."""
    try:
        header = BlockHeader.unpack(value)
    except HeaderError:
        return False
    return header.block_hash == block_hash and header.matches(memoryview(value)[HEADER_BYTES:])
