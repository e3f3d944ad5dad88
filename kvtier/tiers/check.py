"""Checks shared by all tiers: block identity, payload integrity and deadlines."""

import time

from kvtier.core.identity import BlockHeader, HeaderError
from kvtier.errors import TierTimeout
from kvtier.tiers.base import BlockRead, MissReason

__all__ = ["NO_DEADLINE_NS", "check_header", "check_payload", "seconds_left"]

NO_DEADLINE_NS = (1 << 63) - 1
"""A deadline that is never reached."""


def seconds_left(deadline_ns: int) -> float:
    """Return the time until ``deadline_ns``. Raises TierTimeout once it has passed."""
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TierTimeout("the deadline has passed")
    return left_ns / 1e9


def check_header(wanted: BlockRead, packed: bytes | memoryview) -> BlockHeader | MissReason:
    """Return the header in ``packed`` if it identifies the wanted block, else the mismatch."""
    try:
        header = BlockHeader.unpack(packed)
    except HeaderError:
        return MissReason.HEADER
    if (header.block_hash, header.key_space, header.tenant) != (
        wanted.block_hash,
        wanted.key_space,
        wanted.tenant,
    ):
        return MissReason.IDENTITY
    if header.payload_bytes != wanted.payload_bytes:
        return MissReason.LENGTH
    return header


def check_payload(header: BlockHeader, payload: memoryview) -> BlockHeader | MissReason:
    """Return ``header`` if its checksum matches ``payload``."""
    return header if header.matches(payload) else MissReason.CHECKSUM
