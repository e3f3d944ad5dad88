import pytest

from kvtier.core.table import HashTable, as_keys


def keys(*numbers: int):
    return as_keys(b"".join(number.to_bytes(16, "little") for number in numbers))


def test_repeats_in_one_insert_get_one_row():
    table = HashTable()
    rows = table.insert(keys(1, 2, 1, 2, 1)).tolist()
    assert rows[0] == rows[2] == rows[4] != rows[1] == rows[3]
    assert len(table) == 2


def test_a_repeat_in_one_removal_is_removed_once():
    table = HashTable()
    (row,) = table.insert(keys(1)).tolist()
    assert table.remove(keys(1, 1)).tolist() == [row, -1]
    assert len(table) == 0


def test_rows_are_used_again():
    table = HashTable()
    for number in range(3000):
        table.insert(keys(number))
        table.remove(keys(number))
    assert table.capacity == 1024
    assert table.rows().tolist() == []


def test_nothing_is_asked_and_nothing_answered():
    table = HashTable()
    assert table.find(as_keys(b"")).tolist() == []
    assert table.insert(as_keys(b"")).tolist() == []
    assert table.remove(as_keys(b"")).tolist() == []


def test_a_broken_hash_is_an_error():
    with pytest.raises(ValueError, match="no whole number"):
        as_keys(bytes(17))


def test_a_capacity_asked_for_is_there_from_the_start():
    assert HashTable(5000).capacity == 8192
