import numpy as np
import xxhash

from kvtier.core.identity import HEADER_BYTES, PACKED_HEADER, BlockHeader
from kvtier.testing.block import make_chain
from kvtier.tiers.seal import Codec, Stamp
from kvtier.tiers.ssd.record import (
    RECORD_HEAD_BYTES,
    RecordHead,
    RecordState,
    padded,
    record_bytes,
)

STAMP = Stamp(Codec.ENCRYPTED, 7, 1_700_000_000, bytes(range(12)))


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
    packed = RecordHead(header, STAMP, 5, RecordState.REMOVED).pack(9)
    assert len(packed) == RECORD_HEAD_BYTES
    head = RecordHead.unpack(packed, 9)
    assert head is not None
    assert (head.header, head.stamp, head.epoch) == (header, STAMP, 5)
    assert head.state is RecordState.REMOVED
    assert head.payload_bytes == 777


def test_head_of_another_segment_is_none() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), STAMP, 0).pack(9)
    assert RecordHead.unpack(packed, 10) is None


def test_any_flipped_bit_is_found() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), STAMP, 0).pack(9)
    for bit in range(8 * RECORD_HEAD_BYTES):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert RecordHead.unpack(bytes(damaged), 9) is None


def test_any_cut_is_found() -> None:
    packed = RecordHead(make_chain([7])[0].header.pack(), STAMP, 0).pack(9)
    assert all(RecordHead.unpack(packed[:cut], 9) is None for cut in range(RECORD_HEAD_BYTES))


def test_sizes_are_whole_pages() -> None:
    assert [padded(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert [record_bytes(size) for size in (0, 1, 4096, 4097)] == [4096, 8192, 8192, 12_288]


def test_a_head_of_no_state_or_stamp_that_we_know_is_none() -> None:
    """A later version may write what we cannot judge, with a check that holds."""
    packed = RecordHead(make_chain([7])[0].header.pack(), STAMP, 0).pack(9)
    for place, value in ((148, max(RecordState) + 1), (152, max(Codec) + 1), (153, 1)):
        changed = bytearray(packed)
        changed[place] = value
        changed[-8:] = xxhash.xxh3_64_digest(bytes(changed[:-8]))[::-1]
        assert RecordHead.unpack(bytes(changed), 9) is None
    changed[148:156] = packed[148:156]
    changed[-8:] = xxhash.xxh3_64_digest(bytes(changed[:-8]))[::-1]
    assert RecordHead.unpack(bytes(changed), 9) is not None


def test_an_erased_head_tells_its_length_and_nothing_else() -> None:
    header = make_chain([7], 12_345, tenant=b"some tenant.....")[0].header
    head = RecordHead(header.pack(), STAMP, 5).erased()
    erased = RecordHead.unpack(head.pack(9), 9)
    assert erased == head
    assert erased is not None
    assert (erased.state, erased.payload_bytes, erased.epoch) == (RecordState.REMOVED, 12_345, 5)
    for part in (header.block_hash, header.parent_hash, header.tenant, header.key_space):
        assert part not in head.pack(9)
    assert header.checksum not in head.pack(9)
