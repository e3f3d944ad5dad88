"""A client maps the arena ahead, and touches nothing that the daemon has not reserved."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

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


def test_no_core_file_has_it(arena: HostArena, attachment: Attachment) -> None:
    assert attachment, "both have it mapped"
    flags: list[str] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if name == "VmFlags:":
            flags[-1] += rest
        elif not name.endswith(":"):
            flags.append(rest)
    arenas = [each for each in flags if "memfd:kvtier-arena" in each]
    assert len(arenas) >= 2, "the daemon's and the client's"
    assert all(" dd" in each for each in arenas)


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
