"""How a block is stored in Redis: values of bounded size under keys that share a slot.

    PREFIX{HASH}      header (128 bytes), stamp (32), and ``value_bytes`` of payload
    PREFIX{HASH}:1    the next ``value_bytes`` of payload
    PREFIX{HASH}:2    …

Theory
------
The braces are the cluster's hash tag: only what is between them selects the slot, so a block never
spans two servers. The parts are written before the head and read after it, so a head implies that
its parts exist. If they are missing, or from another write, the checksum or tag makes the block a
miss. Every key has a time to live; storing a block again renews all of them.

The length of a head reveals how the block was split, so nodes with different ``value_bytes`` share
blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.core.identity import HEADER_BYTES, BlockHash, BlockHeader, HeaderError
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason
from kvtier.tiers.check import check_header
from kvtier.tiers.redis.resp import ErrorReply, Reply, RespCommand
from kvtier.tiers.seal import STAMP_BYTES, Seal, Stamp

__all__ = ["HEAD_BYTES", "PARTS_MAX", "ReadOutcome", "StoredValue", "ValueFormat", "parse_stored"]

HEAD_BYTES = HEADER_BYTES + STAMP_BYTES
"""Bytes before the payload in the first value."""

PARTS_MAX = 8192
"""Maximum parts of a block: 512 MiB in the smallest values that can be configured."""

_SKEW_S = 300
"""A block with a write time this far in the future is rejected; clocks of nodes differ by less."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """Result of reading one block."""

    result: BlockHeader | MissReason
    is_obsolete: bool = False
    """The stored value is no longer usable by any node."""
    split_bytes: int = 0
    """The block is split differently: read it again in values of this size."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """The head of a stored block: its header, payload size, and number of values."""

    header: BlockHeader | None
    num_bytes: int
    num_parts: int


@dataclass(slots=True)
class ValueFormat:
    """Converts blocks to commands and replies to outcomes. Uses no clock and no connection.

    ``ttl_ms`` and ``max_age_s`` may be changed and apply to values written and read from then on.
    """

    prefix: bytes
    value_bytes: int
    ttl_ms: int
    max_age_s: float
    seal: Seal

    def key(self, block_hash: BlockHash, part: int = 0) -> bytes:
        """Return the key of a block's head, or of a further part."""
        head = b"%s{%s}" % (self.prefix, block_hash.hex().encode())
        return b"%s:%d" % (head, part) if part else head

    def num_parts(self, payload_bytes: int) -> int:
        """Return how many values a block takes."""
        return max(1, -(-payload_bytes // self.value_bytes))

    def gets(self, wanted: BlockRead, head: memoryview, split_bytes: int) -> list[RespCommand]:
        """Return the commands that read a block in place, its head first."""
        commands: list[RespCommand] = []
        for part, piece in enumerate(_pieces(wanted.into[: wanted.payload_bytes], split_bytes)):
            into = (piece,) if part else (head, piece)
            commands.append(RespCommand((b"GET", self.key(wanted.block_hash, part)), into))
        return commands

    def sets(
        self, block: BlockWrite, written_s: int, buffer: memoryview | None
    ) -> list[RespCommand]:
        """Return the commands that write a block, its head last, which publishes it."""
        packed, stamp, stored = self.seal.seal(block.header, block.payload, written_s, buffer)
        expiry = (b"PX", b"%d" % self.ttl_ms)
        commands: list[RespCommand] = []
        for part, piece in enumerate(_pieces(stored, self.value_bytes)):
            pieces = (piece,) if part else (packed, stamp.pack(), piece)
            key = self.key(block.header.block_hash, part)
            commands.append(RespCommand((b"SET", key, pieces, *expiry)))
        return commands[::-1]

    def renewals(self, header: BlockHeader) -> list[RespCommand]:
        """Return the commands that read a block's head and renew the block if it exists."""
        head = self.key(header.block_hash)
        keys = [
            self.key(header.block_hash, part)
            for part in range(self.num_parts(header.payload_bytes))
        ]
        ttl = b"%d" % self.ttl_ms
        return [
            RespCommand((b"GETRANGE", head, b"0", b"%d" % (HEAD_BYTES - 1))),
            RespCommand((b"STRLEN", head)),
            *(RespCommand((b"PEXPIRE", key, ttl)) for key in keys),
        ]

    def is_renewed(self, header: BlockHeader, replies: Sequence[Reply], now_s: float) -> bool:
        """Return from the replies whether the complete, readable block was renewed."""
        packed, length, *renewed = replies
        if not isinstance(packed, bytes) or any(reply != 1 for reply in renewed):
            return False
        stamp = Stamp.unpack(packed[HEADER_BYTES:])
        return (
            packed.startswith(header.identity())
            and length == HEAD_BYTES + min(self.value_bytes, header.payload_bytes)
            and stamp is not None
            and self.seal.may_open(stamp)
            and not self._is_old(stamp, now_s)
        )

    def read_outcome(
        self,
        wanted: BlockRead,
        head: memoryview,
        replies: Sequence[Reply],
        split_bytes: int,
        now_s: float,
    ) -> ReadOutcome:
        """Return the outcome of a read from the replies to ``gets``."""
        length, *lengths = replies
        if isinstance(length, ErrorReply):
            is_other = length.code == "WRONGTYPE"
            return ReadOutcome(
                MissReason.HEADER if is_other else MissReason.ABSENT, is_obsolete=is_other
            )
        if not isinstance(length, int):
            return ReadOutcome(MissReason.ABSENT)
        stamp = Stamp.unpack(head[HEADER_BYTES:]) if length >= HEAD_BYTES else None
        if stamp is None:
            return ReadOutcome(MissReason.HEADER, is_obsolete=True)
        checked = check_header(wanted, head)
        payload = wanted.into[: wanted.payload_bytes]
        if isinstance(checked, MissReason):
            is_owned = checked is not MissReason.HEADER and self._has_wanted_hash(wanted, head)
            return ReadOutcome(checked, is_obsolete=not is_owned)
        is_first_try = split_bytes == self.value_bytes
        stored_bytes = length - HEAD_BYTES
        if stored_bytes != min(split_bytes, len(payload)):
            is_split = is_first_try and 0 < len(payload) / PARTS_MAX <= stored_bytes <= len(payload)
            return ReadOutcome(
                MissReason.LENGTH, is_obsolete=not is_split, split_bytes=stored_bytes * is_split
            )
        if None in lengths and is_first_try:
            return ReadOutcome(MissReason.ABSENT, is_obsolete=True)
        if lengths != [len(piece) for piece in _pieces(payload, split_bytes)][1:]:
            return ReadOutcome(MissReason.LENGTH, is_obsolete=True)
        if self._is_old(stamp, now_s):
            return ReadOutcome(MissReason.EXPIRED, is_obsolete=True)
        result = self.seal.open(checked, stamp, payload)
        is_foreign = result is MissReason.SEAL and not self.seal.may_open(stamp)
        return ReadOutcome(result, is_obsolete=isinstance(result, MissReason) and not is_foreign)

    def _has_wanted_hash(self, wanted: BlockRead, head: memoryview) -> bool:
        """Return whether it is a block of that hash, though not the requested one."""
        return BlockHeader.unpack(head).block_hash == wanted.block_hash

    def _is_old(self, stamp: Stamp, now_s: float) -> bool:
        age_s = now_s - stamp.written_s
        max_age_s = self.max_age_s  # read once: it may change
        return bool(max_age_s) and not -_SKEW_S <= age_s <= max_age_s


def parse_stored(packed: Reply, length: Reply) -> StoredValue:
    """Return what is stored under a key, from the replies to GETRANGE of its head and STRLEN."""
    stored_bytes = max(0, length - HEAD_BYTES) if isinstance(length, int) else 0
    try:
        header = BlockHeader.unpack(packed if isinstance(packed, bytes) else b"")
    except HeaderError:
        return StoredValue(None, stored_bytes, 1)
    is_split = 0 < stored_bytes < header.payload_bytes
    num_parts = min(PARTS_MAX, -(-header.payload_bytes // stored_bytes)) if is_split else 1
    # A header may claim any size, but only stored bytes can be freed.
    return StoredValue(header, min(header.payload_bytes, num_parts * stored_bytes), num_parts)


def _pieces(payload: memoryview, split_bytes: int) -> Iterator[memoryview]:
    """Yield the payload of each value; at least one."""
    for start in range(0, max(1, len(payload)), split_bytes):
        yield payload[start : start + split_bytes]
