"""What is true of a node between any two events, whatever happened before.

``check`` changes nothing and raises AssertionError with the first thing that is wrong. Whole
columns are compared at once, so that a daemon may call it when it is idle.
"""

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvtier.core.index import NO_SLOT
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.reuse.invariants import check_history, residents
from kvtier.core.slots import slot_bytes
from kvtier.core.table import Rows
from kvtier.node.cache import Cache
from kvtier.node.node import Node

__all__ = ["check", "check_memory"]

_CPU = LOWER_TIERS.index(TierName.CPU)


def check(node: Node) -> None:
    """Raise AssertionError if the node's parts contradict each other."""
    rows = np.sort(node.cache.index.rows())
    state = node.cache.index.state[rows]
    assert (state != Residency.ABSENT).any(axis=1).all(), "a row is in no tier at all"
    _check_slots(node.cache, rows, state[:, _CPU])
    _check_checksums(node.cache, rows, state[:, _CPU])
    _check_recency(node.cache, rows, state[:, _CPU])
    _check_pins(node, rows, state[:, _CPU])
    _check_lanes(node)
    _check_stores(node)


def check_memory(node: Node) -> None:
    """Raise AssertionError if the history is wrong in itself, or about where blocks are.

    Slower than ``check``: it looks at each block that is remembered.
    """
    history, index = node.history, node.cache.index
    if history is None:
        return
    node.cache.whereabouts.tell()
    check_history(history)
    for tier in LOWER_TIERS:
        rows = index.in_state(tier, Residency.READY)
        there = {bytes(index.hash_of(row)) for row in rows.tolist()}
        believed = residents(history, tier)
        assert believed <= there, "the history has blocks in a tier that are not there"
        if not index.num_restored:
            assert believed == there, "a tier has blocks that the history does not know of"


def _check_slots(cache: Cache, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Require slots exactly where blocks are, apart, and as many bytes as are counted."""
    slots = cache.index.slot[rows]
    assert ((slots != NO_SLOT) == (state != Residency.ABSENT)).all(), "a slot without a block"
    taken = rows[slots != NO_SLOT]
    starts = cache.index.slot[taken]
    order = np.argsort(starts)
    sizes = np.array([slot_bytes(n) for n in cache.index.payload_bytes[taken].tolist()], np.int64)
    ends = (starts + sizes)[order]
    assert (starts[order][1:] >= ends[:-1]).all(), "two slots overlap"
    assert not len(ends) or ends[-1] <= cache.slots.reserved_bytes, "a slot without memory"
    assert int(sizes.sum()) == cache.slots.used_bytes(), "bytes counted are not bytes used"
    owners = [cache.slots.owners_of(size) for size in cache.slots.sizes()]
    assert sorted(row for each in owners for row in each.tolist()) == sorted(taken.tolist())
    is_held = (state[slots != NO_SLOT] != Residency.READY) | (cache.index.pins[taken] > 0)
    assert int(sizes[is_held].sum()) == cache.slots.held_bytes, "held bytes are not those of pins"


def _check_checksums(cache: Cache, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Require a checksum exactly where a block is ready, or was before it was condemned."""
    is_whole = (state == Residency.READY) | (state == Residency.EVICTING)
    has_checksum = cache.index.checksum[rows].any(axis=1)
    assert (has_checksum == is_whole).all(), "a checksum for a block not ready, or none for one"


def _check_recency(cache: Cache, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Require that no parent is older than its child: then no eviction strands a child."""
    index = cache.index
    here = rows[state == Residency.READY]
    parents = index.parent_rows(here)
    children, parents = here[parents >= 0], parents[parents >= 0]
    both = index.residency(parents, TierName.CPU) == Residency.READY
    assert (index.stamp[parents[both]] >= index.stamp[children[both]]).all(), "an older parent"


def _check_pins(node: Node, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Require the pins of leases and of writes, no more, no fewer."""
    expected = Counter(
        row
        for session in node.sessions.values()
        for lease in session.loads.values()
        for row in lease.rows
    )
    for lane in node.transfers.lanes.values():
        expected.update(row for row in lane.writes)
        for flight in lane.flights.values():
            expected.update(() if flight.is_read else flight.rows)
    pins = node.cache.index.pins[rows]
    pinned = dict(zip(rows[pins != 0].tolist(), pins[pins != 0].tolist(), strict=True))
    assert pinned == dict(expected), "pins are not those of leases and writes"
    assert (state[pins != 0] != Residency.ABSENT).all(), "a pinned block is nowhere"
    evicting = rows[state == Residency.EVICTING]
    assert node.cache.index.pins[evicting].all(), "an expelled block that nobody holds"
    leaving = set(rows[(state == Residency.EVICTING)].tolist())
    leaving |= node.cache.expelled & set(rows[state == Residency.WRITING].tolist())
    assert leaving == node.cache.expelled, "a block is expelled and does not leave"


def _check_lanes(node: Node) -> None:
    """Require states that keep others off the blocks on their way, and a true count."""
    index = node.cache.index
    reading: list[int] = []
    for name, lane in node.transfers.lanes.items():
        flights = lane.flights.values()
        lane.reads.check()
        reading += lane.reads
        reading += [row for flight in flights if flight.is_read for row in flight.rows]
        writing = list(lane.writes)
        writing += [row for flight in flights if not flight.is_read for row in flight.rows]
        assert sorted(writing) == sorted(index.in_state(name, Residency.WRITING).tolist())
        num_bytes = sum(slot_bytes(int(n)) for n in index.payload_bytes[np.array(writing, int)])
        assert num_bytes == lane.queued_bytes, "queued bytes are not those of the queue"
    stored = [
        row
        for session in node.sessions.values()
        for lease in session.stores.values()
        for row in lease.rows
    ]
    # Each slot that is being filled has exactly one who fills it: a read, or a client's store.
    claimed = index.in_state(TierName.CPU, Residency.WRITING).tolist()
    assert sorted(reading + stored) == sorted(claimed), "a claimed slot and nobody to fill it"


def _check_stores(node: Node) -> None:
    """Require that a session's account of what it holds is that of its leases."""
    sizes = node.cache.index.payload_bytes
    for session in node.sessions.values():
        leased = Counter(row for lease in session.loads.values() for row in lease.rows)
        assert leased == session.leased.counts, "blocks on lease are not those of leases"
        num_bytes = sum(slot_bytes(int(sizes[row])) for row in leased)
        assert num_bytes == session.leased.num_bytes, "bytes on lease are not those of leases"
        for lease in session.stores.values():
            num_bytes = sum(slot_bytes(int(sizes[row])) for row in lease.rows)
            assert lease.num_bytes == num_bytes, "a store's bytes are not those of its blocks"
