"""A client maps the arena ahead, and touches nothing that the daemon has not reserved."""

import os
import socket
from collections.abc import Iterator

import pytest

from kvtier.tiers.host import HostArena
from kvtier.transfer.shm import Attachment

SLAB_BYTES = 1 << 20
NUM_SLABS = 4


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(NUM_SLABS, SLAB_BYTES)
    yield arena
    arena.close()


@pytest.fixture
def attachment(arena: HostArena) -> Iterator[Attachment]:
    ours, theirs = socket.socketpair()
    message: dict[str, str | int] = {
        "ticket": "t",
        "boot": "b",
        "size_bytes": arena.size_bytes,
        "proof_offset": arena.capacity_bytes,
    }
    attachment = Attachment(ours, os.dup(arena.fd), message)
    yield attachment
    attachment.close()
    attachment.close()  # idempotent, and no file of somebody else's is closed
    theirs.close()


def reserved_bytes(arena: HostArena) -> int:
    """Return what the arena takes of the machine's memory, but for the page of handshakes."""
    return os.fstat(arena.fd).st_blocks * 512 // SLAB_BYTES * SLAB_BYTES


def test_it_follows_the_daemon(arena: HostArena, attachment: Attachment) -> None:
    seen: list[int] = []

    def is_over() -> bool:
        seen.append(reserved_bytes(arena))
        if len(seen) <= NUM_SLABS:
            arena.reserve(len(seen) - 1)
        return False

    attachment.populate(is_over)
    assert seen[: NUM_SLABS + 1] == [number * SLAB_BYTES for number in range(NUM_SLABS + 1)]


def test_it_ends_where_the_daemon_does_not_go_on(arena: HostArena, attachment: Attachment) -> None:
    arena.reserve(0)
    answers = iter((False, True))
    attachment.populate(lambda: next(answers))
    assert reserved_bytes(arena) == SLAB_BYTES
