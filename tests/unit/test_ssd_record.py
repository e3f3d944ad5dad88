import numpy as np

from kvtier.core.identity import HEADER_BYTES, PACKED_HEADER, BlockHeader
from kvtier.testing.block import make_chain
from kvtier.tiers.ssd.record import (
    RECORD_HEAD_BYTES,
    RecordHead,
    RecordState,
    padded,
    record_bytes,
)


def test_columns_agree_with_the_packed_header() -> None:
    header = make_chain([1, 2, 3], 12_345, tenant=b"some tenant.....")[2].header
    assert PACKED_HEADER.itemsize == HEADER_BYTES
    (row,) = np.frombuffer(header.pack(), PACKED_HEADER)
    assert row["position"] == header.position == 2
    assert row["payload_bytes"] == 12_345
    assert row["block_hash"].tobytes() == header.block_hash
    assert row["parent_hash"].tobytes() == header.parent_hash
    assert row["space"].tobytes() == header.key_space + header.tenant
    assert BlockHeader.unpack(row.tobytes()) == header


def test_head_comes_back_as_written() -> None:
    header = make_chain([7], 777)[0].header.pack()
    packed = RecordHead(header, 5, RecordState.REMOVED).pack(9)
    assert len(packed) == RECORD_HEAD_BYTES
    head = RecordHead.unpack(packed, 9)
    assert head is not None
    assert (head.header, head.opening, head.state) == (header, 5, RecordState.REMOVED)
    assert head.payload_bytes == 777


def test_head_of_another_segment_is_none() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), 0).pack(9)
    assert RecordHead.unpack(packed, 10) is None


def test_any_flipped_bit_is_found() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), 0).pack(9)
    for bit in range(8 * RECORD_HEAD_BYTES):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert RecordHead.unpack(bytes(damaged), 9) is None


def test_any_cut_is_found() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), 0).pack(9)
    assert all(RecordHead.unpack(packed[:cut], 9) is None for cut in range(RECORD_HEAD_BYTES))


def test_sizes_are_whole_pages() -> None:
    assert [padded(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert [record_bytes(size) for size in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12_288]
