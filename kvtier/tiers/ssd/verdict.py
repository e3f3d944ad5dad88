"""What a record as it lies on the disk is worth, for whoever has not been asked for it.

Readers know whom they want and check for that (fetch.py). Reclaim, scrub and fsck know only where
a record is; they let it say who it is, and check that it is so.
"""

from dataclasses import dataclass

from kvtier.core.identity import BlockHeader, HeaderError
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import MissReason
from kvtier.tiers.seal import Codec, Seal
from kvtier.tiers.ssd.disk import Disk, PageReader
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState

__all__ = ["RecordVerdict", "examine", "read_record"]


@dataclass(frozen=True, slots=True)
class RecordVerdict:
    """What was found; ``head`` and ``header`` as far as they can be read."""

    head: RecordHead | None = None
    header: BlockHeader | None = None
    fault: MissReason | None = None
    """Why it would be a miss; None for a sound block, ABSENT for a record that does not count."""
    is_damage: bool = False
    """It is the record that is at fault, and not a key that we do not have."""


def read_record(disk: Disk, fd: int, page: int, into: memoryview) -> None:
    """Fill ``into``, aligned whole pages, from a record's first page on; raises OSError."""
    reader = PageReader(disk, fd, page * PAGE_BYTES, into)
    reader.add(into)
    reader.flush()
    disk.drop_cache(fd)


def examine(record: memoryview, segment_number: int, seal: Seal) -> RecordVerdict:
    """Judge a record by itself. Changes nothing: what is encrypted is opened as a copy."""
    head = RecordHead.unpack(bytes(record[:RECORD_HEAD_BYTES]), segment_number)
    if head is None:
        return RecordVerdict(fault=MissReason.HEADER, is_damage=True)
    if head.state is not RecordState.LIVE:
        return RecordVerdict(head, fault=MissReason.ABSENT)
    try:
        header = BlockHeader.unpack(head.header)
    except HeaderError:
        return RecordVerdict(head, fault=MissReason.HEADER, is_damage=True)
    payload = record[PAGE_BYTES : PAGE_BYTES + header.payload_bytes]
    if len(payload) < header.payload_bytes:
        return RecordVerdict(head, header, MissReason.LENGTH, is_damage=True)
    if head.stamp.codec is Codec.ENCRYPTED:
        payload = memoryview(bytearray(payload))
    opened = seal.open(header, head.stamp, payload)
    if isinstance(opened, BlockHeader):
        return RecordVerdict(head, header)
    is_damage = opened is not MissReason.SEAL or seal.may_open(head.stamp)
    return RecordVerdict(head, header, opened, is_damage=is_damage)
