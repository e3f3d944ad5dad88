"""How a block lies in a server: values of a bounded size, under keys that share a slot.

    PREFIX{HASH}      header (128 bytes), stamp (32), and ``value_bytes`` of payload
    PREFIX{HASH}:1    the next ``value_bytes`` of it
    PREFIX{HASH}:2    …

Theory
------
The braces are the cluster's: only what is between them chooses the slot, so a block never spans
two servers. The parts are written before the head and read after it, so that a head says its parts
are there; where they are not, or are another writing's, the block is a miss, by its checksum or
tag at the latest. Every key has a time to live, and storing a block again renews all of them.

The length of a head tells how it was split, so nodes with another ``value_bytes`` share blocks.
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
"""What comes before the payload."""

PARTS_MAX = 8192
"""Of one block: 512 MiB in the smallest values that can be set."""

_SKEW_S = 300
"""A block written later than this from now on was not: clocks of nodes differ by less."""


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """What became of one read."""

    result: BlockHeader | MissReason
    is_over: bool = False
    """What lies there serves nobody any more."""
    split_bytes: int = 0
    """It is split otherwise: to be read again in values of this size."""


@dataclass(frozen=True, slots=True)
class StoredValue:
    """What the head of a block says of it: whose it is, its payload, and in how many values."""

    header: BlockHeader | None
    num_bytes: int
    num_parts: int


@dataclass(slots=True)
class ValueFormat:
    """Turns blocks into commands and replies into verdicts. No clock, no connection.

    ``ttl_ms`` and ``max_age_s`` may be changed, for values written and read from then on.
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
        """Return how many values a block takes here."""
        return max(1, -(-payload_bytes // self.value_bytes))

    def gets(self, wanted: BlockRead, head: memoryview, split_bytes: int) -> list[RespCommand]:
        """Return the commands that read a block in place: its head first."""
        commands: list[RespCommand] = []
        for part, piece in enumerate(_pieces(wanted.into[: wanted.payload_bytes], split_bytes)):
            into = (piece,) if part else (head, piece)
            commands.append(RespCommand((b"GET", self.key(wanted.block_hash, part)), into))
        return commands

    def sets(
        self, block: BlockWrite, written_s: int, buffer: memoryview | None
    ) -> list[RespCommand]:
        """Return the commands that write a block: its head last, which publishes it."""
        packed, stamp, stored = self.seal.seal(block.header, block.payload, written_s, buffer)
        expiry = (b"PX", b"%d" % self.ttl_ms)
        commands: list[RespCommand] = []
        for part, piece in enumerate(_pieces(stored, self.value_bytes)):
            pieces = (piece,) if part else (packed, stamp.pack(), piece)
            key = self.key(block.header.block_hash, part)
            commands.append(RespCommand((b"SET", key, pieces, *expiry)))
        return commands[::-1]

    def renewals(self, header: BlockHeader) -> list[RespCommand]:
        """Return the commands that ask for a block's head and renew the block where it is there."""
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
        """Tell from the replies whether the block is there, whole, ours to open, and renewed."""
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

    def judge(
        self,
        wanted: BlockRead,
        head: memoryview,
        replies: Sequence[Reply],
        split_bytes: int,
        now_s: float,
    ) -> ReadOutcome:
        """Return what the replies to ``gets`` are worth."""
        length, *lengths = replies
        if isinstance(length, ErrorReply):
            is_other = length.code == "WRONGTYPE"
            return ReadOutcome(
                MissReason.HEADER if is_other else MissReason.ABSENT, is_over=is_other
            )
        if not isinstance(length, int):
            return ReadOutcome(MissReason.ABSENT)
        stamp = Stamp.unpack(head[HEADER_BYTES:]) if length >= HEAD_BYTES else None
        if stamp is None:
            return ReadOutcome(MissReason.HEADER, is_over=True)
        checked = check_header(wanted, head)
        payload = wanted.into[: wanted.payload_bytes]
        if isinstance(checked, MissReason):
            is_owned = checked is not MissReason.HEADER and self._has_wanted_hash(wanted, head)
            return ReadOutcome(checked, is_over=not is_owned)
        is_first_try = split_bytes == self.value_bytes
        stored_bytes = length - HEAD_BYTES
        if stored_bytes != min(split_bytes, len(payload)):
            is_split = is_first_try and 0 < len(payload) / PARTS_MAX <= stored_bytes <= len(payload)
            return ReadOutcome(
                MissReason.LENGTH, is_over=not is_split, split_bytes=stored_bytes * is_split
            )
        if None in lengths and is_first_try:
            return ReadOutcome(MissReason.ABSENT, is_over=True)
        if lengths != [len(piece) for piece in _pieces(payload, split_bytes)][1:]:
            return ReadOutcome(MissReason.LENGTH, is_over=True)
        if self._is_old(stamp, now_s):
            return ReadOutcome(MissReason.EXPIRED, is_over=True)
        result = self.seal.open(checked, stamp, payload)
        is_foreign = result is MissReason.SEAL and not self.seal.may_open(stamp)
        return ReadOutcome(result, is_over=isinstance(result, MissReason) and not is_foreign)

    def _has_wanted_hash(self, wanted: BlockRead, head: memoryview) -> bool:
        """Tell whether it is a block of that hash, only not the one that was asked for."""
        return BlockHeader.unpack(head).block_hash == wanted.block_hash

    def _is_old(self, stamp: Stamp, now_s: float) -> bool:
        age_s = now_s - stamp.written_s
        max_age_s = self.max_age_s  # once: it may be changed meanwhile
        return bool(max_age_s) and not -_SKEW_S <= age_s <= max_age_s


def parse_stored(packed: Reply, length: Reply) -> StoredValue:
    """Return what is under a key, from the replies to GETRANGE of its head and to STRLEN."""
    stored_bytes = max(0, length - HEAD_BYTES) if isinstance(length, int) else 0
    try:
        header = BlockHeader.unpack(packed if isinstance(packed, bytes) else b"")
    except HeaderError:
        return StoredValue(None, stored_bytes, 1)
    is_split = 0 < stored_bytes < header.payload_bytes
    num_parts = min(PARTS_MAX, -(-header.payload_bytes // stored_bytes)) if is_split else 1
    # A header may declare any size, but no more than what is stored can be freed.
    return StoredValue(header, min(header.payload_bytes, num_parts * stored_bytes), num_parts)


def _pieces(payload: memoryview, split_bytes: int) -> Iterator[memoryview]:
    """Yield the payload of each value: there is one at least."""
    for start in range(0, max(1, len(payload)), split_bytes):
        yield payload[start : start + split_bytes]
