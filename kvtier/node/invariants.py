"""Checks a node's invariants, which hold between any two events.

``check`` changes nothing and raises AssertionError with the first violation. It compares whole
columns at once, so that a daemon can run it when it is idle.
"""

from collections import Counter

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import split_hashes
from kvtier.core.index import NO_SLOT, BlockIndex
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.reuse.history import History
from kvtier.core.reuse.invariants import check_history, residents
from kvtier.core.slots import slot_bytes
from kvtier.core.slow_tier import AdminState
from kvtier.core.table import Rows
from kvtier.node.node import Node
from kvtier.node.state.cache import Cache
from kvtier.observe.daemon_metrics import (
    ABSENT_TOKENS,
    ASKED_TOKENS,
    FOUND_TOKENS,
    LEFT_TOKENS,
    LOADED_TOKENS,
    ORDERED_TOKENS,
    UNLOADED_TOKENS,
)

__all__ = ["check", "check_memory", "check_token_counters"]

_CPU = LOWER_TIERS.index(TierName.CPU)


def check(node: Node) -> None:
    """Raise AssertionError if the node's parts are inconsistent."""
    rows = np.sort(node.cache.index.rows())
    state = node.cache.index.state[rows]
    assert (state != Residency.ABSENT).any(axis=1).all(), "a row is in no tier"
    _check_key_space_usage(node.cache.index, rows)
    _check_slots(node.cache, rows, state[:, _CPU])
    _check_checksums(node.cache, rows, state[:, _CPU])
    _check_recency(node.cache, rows, state[:, _CPU])
    _check_pins(node, rows, state[:, _CPU])
    _check_lanes(node)
    _check_stores(node)


def check_memory(node: Node) -> None:
    """Raise AssertionError if the history contradicts itself or the index.

    Slower than ``check``: it visits every block that the history remembers.
    """
    history, index = node.history, node.cache.index
    if history is None:
        return
    node.cache.residency_listener.report_arrivals()
    check_history(history)
    for tier in LOWER_TIERS:
        rows = index.in_state(tier, Residency.READY)
        there = set(index.hashes_of(rows))
        believed = residents(history, tier)
        assert believed <= there, "the history has blocks in a tier that are not there"
        missing = list(there - believed)
        if not index.num_restored:
            assert not missing, "a tier has blocks that the history does not know of"
        assert history.needs_adoption(missing).all(), "the history knows a block, but not its tier"
    _check_parents(history, index)


def check_token_counters(node: Node) -> None:
    """Raise AssertionError if the token counters do not add up; call it while no load is open."""
    tokens: Counter[str] = Counter()
    for family in node.metrics.registry.collect():
        for sample in family.samples:
            tokens[sample.name] += int(sample.value)
    found, left = tokens[FOUND_TOKENS.name], tokens[LEFT_TOKENS.name]
    loaded, unloaded = tokens[LOADED_TOKENS.name], tokens[UNLOADED_TOKENS.name]
    assert tokens[ASKED_TOKENS.name] == found + tokens[ABSENT_TOKENS.name], "tokens were lost"
    assert left <= found, "more is left than was found"
    assert tokens[ORDERED_TOKENS.name] == loaded + unloaded, "ordered tokens were lost"


def _check_parents(history: History, index: BlockIndex) -> None:
    """Check that history and index agree on the parents of blocks in the CPU tier."""
    rows, blocks = index.in_state(TierName.CPU, Residency.READY), history.blocks
    known = blocks.find(index.hashes_of(rows))
    parents = blocks.find(split_hashes(index.parent[rows].tobytes()))
    assert (blocks.parent[known] == parents).all(), "the history and the index differ on a parent"


def _check_key_space_usage(index: BlockIndex, rows: Rows) -> None:
    """Check the running counts of each key space against a fresh count."""
    key_space_of = {number: scope.key_space for number, scope in index.scopes()}
    for tier in LOWER_TIERS:
        ready = rows[index.residency(rows, tier) == Residency.READY]
        found = Counter[bytes]()
        for number, count in zip(*np.unique(index.scope[ready], return_counts=True), strict=True):
            found[key_space_of[int(number)]] += int(count)
        counted = {key_space: held.num_blocks for key_space, held in index.held_in(tier).items()}
        assert counted == found, f"the key space usage of the {tier} tier is wrong"


def _check_slots(cache: Cache, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Check that exactly the blocks in the CPU tier have slots, and all counts of bytes."""
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
    """Check that exactly the blocks that are ready, or were until condemned, have a checksum."""
    is_whole = (state == Residency.READY) | (state == Residency.EVICTING)
    has_checksum = cache.index.checksum[rows].any(axis=1)
    assert (has_checksum == is_whole).all(), "a checksum for a block not ready, or none for one"


def _check_recency(cache: Cache, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Check that no parent is older than its child, so that no eviction strands a child."""
    index = cache.index
    here = rows[state == Residency.READY]
    parents = index.parent_rows(here)
    children, parents = here[parents >= 0], parents[parents >= 0]
    both = index.residency(parents, TierName.CPU) == Residency.READY
    assert (index.stamp[parents[both]] >= index.stamp[children[both]]).all(), "an older parent"


def _check_pins(node: Node, rows: Rows, state: npt.NDArray[np.uint8]) -> None:
    """Check that the pins are exactly those of leases and writes."""
    expected = Counter(
        row
        for session in node.sessions.values()
        for lease in session.loads.values()
        for row in lease.rows
    )
    in_flight = [*node.transfers.orphans.values()]
    for lane in node.transfers.lanes.values():
        expected.update(row for row in lane.writes)
        in_flight += lane.in_flight.values()
    expected.update(row for transfer in in_flight if not transfer.is_read for row in transfer.rows)
    pins = node.cache.index.pins[rows]
    pinned = dict(zip(rows[pins != 0].tolist(), pins[pins != 0].tolist(), strict=True))
    assert pinned == dict(expected), "pins are not those of leases and writes"
    assert (state[pins != 0] != Residency.ABSENT).all(), "a pinned block is nowhere"
    evicting = rows[state == Residency.EVICTING]
    assert node.cache.index.pins[evicting].all(), "an expelled block that nobody holds"
    leaving = set(rows[(state == Residency.EVICTING)].tolist())
    leaving |= node.cache.expelled & set(rows[state == Residency.WRITING].tolist())
    assert leaving == node.cache.expelled, "an expelled block does not leave"


def _check_lanes(node: Node) -> None:
    """Check the states of blocks in transfer, and the counters of the lanes."""
    index = node.cache.index
    orphans = node.transfers.orphans.values()
    reading = [row for transfer in orphans if transfer.is_read for row in transfer.rows]
    for name, lane in node.transfers.lanes.items():
        in_flight = lane.in_flight.values()
        lane.reads.check()
        reading += lane.reads
        reading += [row for transfer in in_flight if transfer.is_read for row in transfer.rows]
        writing = list(lane.writes)
        writing += [row for transfer in in_flight if not transfer.is_read for row in transfer.rows]
        assert sorted(writing) == sorted(index.in_state(name, Residency.WRITING).tolist())
        num_bytes = sum(slot_bytes(int(n)) for n in index.payload_bytes[np.array(writing, int)])
        assert num_bytes == lane.queued_bytes, "queued bytes are not those of the queue"
        is_at_rest = lane.is_idle and lane.purging is None
        assert lane.admin_state is not AdminState.DETACHED or is_at_rest, (
            "work for a tier that is off"
        )
    stored = [
        row
        for session in node.sessions.values()
        for lease in session.stores.values()
        for row in lease.rows
    ]
    # Each slot in state writing is filled by exactly one read or store.
    claimed = index.in_state(TierName.CPU, Residency.WRITING).tolist()
    assert sorted(reading + stored) == sorted(claimed), (
        "claimed slots are not those of reads and stores"
    )


def _check_stores(node: Node) -> None:
    """Check each session's account of what it holds against its leases."""
    sizes = node.cache.index.payload_bytes
    for session in node.sessions.values():
        leased = Counter(row for lease in session.loads.values() for row in lease.rows)
        assert leased == session.leased.counts, "blocks on lease are not those of leases"
        num_bytes = sum(slot_bytes(int(sizes[row])) for row in leased)
        assert num_bytes == session.leased.num_bytes, "bytes on lease are not those of leases"
        for lease in session.stores.values():
            num_bytes = sum(slot_bytes(int(sizes[row])) for row in lease.rows)
            assert lease.num_bytes == num_bytes, "a store's bytes are not those of its blocks"
