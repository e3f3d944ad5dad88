"""TierWrapper: the base class of tiers that add behaviour to every call of another tier."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvtier.core.identity import BlockHash, BlockHeader, Headers, Selection
from kvtier.tiers.base import (
    BlockRead,
    BlockWrite,
    Health,
    MissReason,
    Removed,
    Scrubbed,
    Tier,
    TierProperties,
    TierUsage,
    WriteReport,
)

__all__ = ["Operation", "TierCall", "TierWrapper"]

T = TypeVar("T")


class Operation(StrEnum):
    """Calls that access the device. A closed set; each value is a metric label."""

    WRITE = "write"
    READ = "read"
    CONTAINS = "contains"
    REMOVE = "remove"
    PURGE = "purge"
    HEALTH_CHECK = "probe"
    SCRUB = "scrub"


@dataclass(frozen=True, slots=True)
class TierCall:
    """A call of the inner tier."""

    operation: Operation
    num_blocks: int
    num_bytes: int
    deadline_ns: int


class TierWrapper:
    """A tier that passes every call to ``inner`` through ``intercept``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    @property
    def properties(self) -> TierProperties:
        """Return the properties of the inner tier."""
        return self.inner.properties

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        """Call the inner tier by calling ``step``. Wrappers override this."""
        return step()

    def write(self, blocks: Sequence[BlockWrite], deadline_ns: int) -> WriteReport:
        """Write through ``intercept``."""
        num_bytes = sum(len(block.payload) for block in blocks)
        call = TierCall(Operation.WRITE, len(blocks), num_bytes, deadline_ns)
        return self.intercept(call, lambda: self.inner.write(blocks, deadline_ns))

    def read(self, blocks: Sequence[BlockRead], deadline_ns: int) -> list[BlockHeader | MissReason]:
        """Read through ``intercept``."""
        num_bytes = sum(block.payload_bytes for block in blocks)
        call = TierCall(Operation.READ, len(blocks), num_bytes, deadline_ns)
        return self.intercept(call, lambda: self.inner.read(blocks, deadline_ns))

    def contains(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Sequence[bool | None]:
        """Ask through ``intercept``."""
        call = TierCall(Operation.CONTAINS, len(hashes), 0, deadline_ns)
        return self.intercept(call, lambda: self.inner.contains(hashes, deadline_ns))

    def remove(self, hashes: Sequence[BlockHash], deadline_ns: int) -> Removed:
        """Remove through ``intercept``."""
        call = TierCall(Operation.REMOVE, len(hashes), 0, deadline_ns)
        return self.intercept(call, lambda: self.inner.remove(hashes, deadline_ns))

    def purge(self, selection: Selection, deadline_ns: int) -> Removed:
        """Purge through ``intercept``."""
        call = TierCall(Operation.PURGE, 0, 0, deadline_ns)
        return self.intercept(call, lambda: self.inner.purge(selection, deadline_ns))

    def health_check(self, deadline_ns: int) -> None:
        """Check through ``intercept``."""
        call = TierCall(Operation.HEALTH_CHECK, 0, 0, deadline_ns)
        self.intercept(call, lambda: self.inner.health_check(deadline_ns))

    @contextlib.contextmanager
    def scratch(self, block_bytes: int, num_blocks: int, deadline_ns: int) -> Iterator[Tier]:
        """Open a scratch tier of the inner tier; its calls pass through ``intercept``."""
        with self.inner.scratch(block_bytes, num_blocks, deadline_ns) as scratch:
            yield _Scratch(scratch, self)

    def scrub(self, max_bytes: int, deadline_ns: int) -> Scrubbed:
        """Scrub through ``intercept``."""
        call = TierCall(Operation.SCRUB, 0, max_bytes, deadline_ns)
        return self.intercept(call, lambda: self.inner.scrub(max_bytes, deadline_ns))

    def headers(self) -> Iterator[Headers]:
        """Yield the headers of the inner tier."""
        return self.inner.headers()

    def health(self) -> Health:
        """Return the health of the inner tier."""
        return self.inner.health()

    def usage(self) -> TierUsage:
        """Return the usage of the inner tier."""
        return self.inner.usage()

    def close(self) -> None:
        """Close the inner tier."""
        self.inner.close()


class _Scratch(TierWrapper):
    """A scratch tier whose calls pass through the wrapper of its tier."""

    def __init__(self, inner: Tier, outer: TierWrapper) -> None:
        super().__init__(inner)
        self._outer = outer

    def intercept(self, call: TierCall, step: Callable[[], T]) -> T:
        return self._outer.intercept(call, step)
