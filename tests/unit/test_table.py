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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match="not a multiple of"):
        as_keys(bytes(17))


def test_a_capacity_asked_for_is_there_from_the_start():
    assert HashTable(5000).capacity == 8192


CHOSEN = {
    "counters": list(range(20_000)),
    "one low half": [n << 64 for n in range(20_000)],
    "one high half": [(n << 40) + (7 << 64) for n in range(20_000)],
    "equal low bits": [n << 30 for n in range(20_000)],
    "halves that cancel out": [n + ((-n % 2**64) << 64) for n in range(20_000)],
    # What the factors of a well-known hash would put into one bucket.
    "against golden factors": [
        (n * pow(0x9E3779B97F4A7C15, -1, 2**64) * -0xD1B54A32D192ED03 % 2**64) + (n << 64)
        for n in range(20_000)
    ],
}


@pytest.mark.parametrize("name", CHOSEN)
def test_no_choice_of_keys_makes_many_meet_in_one_place(name):
    table, chosen = HashTable(), keys(*CHOSEN[name])
    table.insert(chosen)
    rows = table.find(chosen)
    assert len(table) == len(set(rows.tolist())) == len(chosen)
    _, ends = table._probe(chosen)
    starts, mask = table._first_buckets(chosen, len(table._buckets) - 1), len(table._buckets) - 1
    assert ((ends - starts) & mask).max() < 200  # of 65,536; by chance alone it is 15


def test_rows_come_in_order_whatever_the_secret():
    table = HashTable()
    table.insert(keys(*range(100)))
    table.remove(keys(*range(0, 100, 3)))
    rows = table.rows().tolist()
    assert rows == sorted(rows) == sorted(table.find(keys(*range(1, 100, 3), *range(2, 100, 3))))
