import numpy as np
from rows import SCOPE, add, chain, packed

from kvtier.core import index as index_module
from kvtier.core.identity import NO_TENANT
from kvtier.core.index import NO_SLOT, BlockIndex, Scope
from kvtier.core.residency import Residency, TierName
from kvtier.core.table import as_keys
from kvtier.testing.block import TEST_KEY_SPACE, make_chain


def test_a_row_says_whose_block_it_is():
    index, headers = BlockIndex(), chain(1, 2, 3)
    rows = add(index, headers)
    assert [index.header_of(row).identity() for row in rows] == [h.identity() for h in headers]
    assert index.parent_rows(rows).tolist() == [-1, rows[0], rows[1]]


def test_adding_again_keeps_what_is_known():
    index, headers = BlockIndex(), chain(1, 2, 3)
    rows = add(index, headers[:2])
    index.move(rows, TierName.SSD, Residency.READY)
    again = add(index, headers)
    assert again[:2].tolist() == rows.tolist()
    assert index.residency(again, TierName.SSD).tolist() == [2, 2, 0]


def test_only_what_is_nowhere_is_forgotten():
    index, headers = BlockIndex(), chain(1, 2, 3)
    rows = add(index, headers)
    index.move(rows[1], TierName.REMOTE, Residency.READY)
    index.forget_absent(rows)
    assert len(index) == 1
    assert index.hash_of(int(rows[1])) == headers[1].block_hash


def test_what_a_tier_held_before_is_ready_there():
    index, headers = BlockIndex(), chain(1, 2, 3)
    index.restore(packed(headers), TierName.SSD)
    rows = index.in_state(TierName.SSD, Residency.READY)
    assert {index.header_of(row).identity() for row in rows} == {h.identity() for h in headers}
    assert (index.slot[rows] == NO_SLOT).all()


def test_looking_for_a_scope_does_not_make_it_known():
    index = BlockIndex()
    assert index.known_scope(SCOPE) == -1
    assert index.scope_id(SCOPE) == index.known_scope(SCOPE) == 0
    assert list(index.scopes()) == [(0, SCOPE)]


def test_columns_grow_with_the_table():
    index = BlockIndex()
    rows = add(index, chain(*range(3000)))
    assert len(index) == 3000
    assert (index.slot[rows] == NO_SLOT).all()
    assert index.position[rows].tolist() == list(range(3000))
    assert not np.any(index.pins[rows])


def test_scopes_without_blocks_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr(index_module, "SCOPES_WITHOUT_BLOCKS_MAX", 10)
    index = BlockIndex()
    rows = add(index, chain(1, 2, 3))
    index.move(rows, TierName.SSD, Residency.READY)
    numbers = [index.scope_id(Scope(TEST_KEY_SPACE, n.to_bytes(16, "big"))) for n in range(1, 500)]
    assert max(numbers) < 12
    assert index.known_scope(SCOPE) == 0
    assert index.known_scope(Scope(TEST_KEY_SPACE, (1).to_bytes(16, "big"))) == -1
    assert len(list(index.scopes())) <= 12
    assert index.header_of(int(rows[0])).tenant == NO_TENANT


def test_each_recovered_block_keeps_its_tenant_where_there_are_many(monkeypatch):
    monkeypatch.setattr(index_module, "SCOPES_WITHOUT_BLOCKS_MAX", 3)
    tenants = [n.to_bytes(16, "big") for n in range(1, 100)]
    headers = [make_chain([7], tenant=tenant)[0].header for tenant in tenants]
    index = BlockIndex()
    index.restore(packed(headers), TierName.SSD)
    rows = [int(index.find(as_keys(header.block_hash))[0]) for header in headers]
    assert [index.header_of(row).tenant for row in rows] == tenants
