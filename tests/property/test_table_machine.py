"""HashTable against a dict."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.core.table import HashTable, as_keys

# Few distinct low halves: keys collide in their buckets, as a million of them do.
KEYS = st.integers(0, 400).map(
    lambda n: (n % 7).to_bytes(8, "little") + (n // 7).to_bytes(8, "little")
)
BATCHES = st.lists(KEYS, max_size=40)


class TableMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = HashTable()
        self.model: dict[bytes, int] = {}

    @rule(batch=BATCHES)
    def insert(self, batch):
        rows = self.table.insert(as_keys(b"".join(batch))).tolist()
        for key, row in zip(batch, rows, strict=True):
            assert self.model.setdefault(key, row) == row
        assert len(set(self.model.values())) == len(self.model), "two keys share a row"

    @rule(batch=BATCHES)
    def remove(self, batch):
        rows = self.table.remove(as_keys(b"".join(batch))).tolist()
        assert rows == [self.model.pop(key, -1) for key in batch]

    @rule(batch=BATCHES)
    def find(self, batch):
        rows = self.table.find(as_keys(b"".join(batch))).tolist()
        assert rows == [self.model.get(key, -1) for key in batch]

    @rule()
    def clear(self):
        self.table.clear()
        self.model.clear()

    @invariant()
    def knows_what_the_model_knows(self):
        assert len(self.table) == len(self.model)
        assert sorted(self.table.rows().tolist()) == sorted(self.model.values())
        for key, row in self.model.items():
            assert self.table.keys[row].tobytes() == key


TestTable = pytest.mark.slow(TableMachine.TestCase)
TestTable.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)


def test_a_table_that_churns_for_long_stays_right_and_does_not_grow():
    draw = np.random.default_rng(7)
    table, model = HashTable(), dict[bytes, int]()
    for _ in range(300):
        fresh = draw.integers(0, 2**63, (60, 2), dtype=np.uint64)
        for key, row in zip(fresh, table.insert(fresh).tolist(), strict=True):
            model[key.tobytes()] = row
        gone = list(model)[: max(0, len(model) - 900)]
        assert table.remove(as_keys(b"".join(gone))).tolist() == [model.pop(key) for key in gone]
    assert table.capacity == 1024
    assert table.find(as_keys(b"".join(model))).tolist() == list(model.values())


def test_a_table_grows_and_keeps_its_rows():
    keys = np.random.default_rng(8).integers(0, 2**63, (20_000, 2), dtype=np.uint64)
    table = HashTable()
    rows = [table.insert(part) for part in np.split(keys, 20)]
    assert (table.find(keys) == np.concatenate(rows)).all()
    assert len(np.unique(table.find(keys))) == 20_000
