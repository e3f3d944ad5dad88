"""A load as its client sees it: what the daemon announces, and the lease behind it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.core.identity import HASH_BYTES, BlockHash
from kvtier.core.residency import TierName
from kvtier.v1 import engine_pb2 as pb
from kvtier.wire.convert import tier_from_wire

__all__ = ["HeldBlocks", "OpenLoad", "Replies", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A block as it is announced, not verified yet."""

    offset: int
    """Into the arena."""
    checksum: bytes
    tier: TierName


class Replies(Protocol):
    """A stream of gRPC's."""

    def __iter__(self) -> Iterator[pb.LoadReply]: ...

    def cancel(self) -> None:
        """End it early."""


@dataclass(slots=True)
class OpenLoad:
    """One call of ``Load``."""

    tenant: bytes
    hashes: Sequence[BlockHash]
    parents: Sequence[BlockHash]
    num_blocks: int
    deadline_s: float
    good_until_s: float
    """The lease lasts that long for sure, on the monotonic clock."""
    replies: Replies
    lease: int = 0
    end: str = ""
    corrupt: list[int] = field(default_factory=list)
    """Places, in the order announced."""

    @property
    def left_s(self) -> float:
        """Return what is left of the call's time."""
        return self.deadline_s - time.monotonic()

    def announced(self) -> Iterator[Slot]:
        """Yield slots as they are announced, noting what is said of the lease."""
        for reply in self.replies:
            self.lease = reply.lease
            self.num_blocks = reply.blocks or self.num_blocks
            for place, offset in enumerate(reply.offsets):
                checksum = reply.checksums[place * HASH_BYTES : (place + 1) * HASH_BYTES]
                yield Slot(offset, checksum, tier_from_wire(reply.tiers[place]))
            self.end = reply.end


class HeldBlocks:
    """Blocks that lie verified in the arena, and stay there until released or ``good_until_s``.

    It is no user of its link: where that breaks, or the daemon ends, the lease is gone with it, and
    nobody waits for a release.
    """

    def __init__(
        self,
        tiers: tuple[TierName, ...],
        end: str,
        good_until_s: float,
        release: Callable[[], None],
    ) -> None:
        self.tiers = tiers
        """Where each block came from, from the first one asked for on."""
        self.end = end
        """Why there are no more."""
        self.good_until_s = good_until_s
        """On the monotonic clock."""
        self._release = release
        self._lock = threading.Lock()
        self._is_released = False

    def release(self) -> None:
        """Let go, and say which blocks were corrupt. Idempotent; neither waits nor raises."""
        with self._lock:
            was_released, self._is_released = self._is_released, True
        if not was_released:
            self._release()
