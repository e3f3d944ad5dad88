import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from kvtier.core.identity import BlockHeader, payload_checksum
from kvtier.errors import StartError
from kvtier.testing.block import make_chain
from kvtier.tiers.base import MissReason
from kvtier.tiers.seal import STAMP_BYTES, Codec, KeyRing, Seal, SealMode, Stamp

KEY_A, KEY_B, KEY_C = (f"{n:02x}" * 32 for n in (0xA1, 0xB2, 0xC3))
NOW_S = 1_800_000_000
LONG = 5_000


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def _ring(directory: Path, *lines: str) -> KeyRing:
    path = _write(directory / f"keys-{os.urandom(4).hex()}", "\n".join(lines))
    return KeyRing.load(path)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return _ring(tmp_path, f"a {KEY_A}")


@dataclass
class Stored:
    """A block as it lies on a medium."""

    header: bytes
    stamp: bytes
    payload: bytearray


def _seal(seal: Seal, header: BlockHeader, payload: bytes, written_s: int = NOW_S) -> Stored:
    into = memoryview(bytearray(len(payload) + 100)) if seal.needs_buffer else None
    packed, stamp, stored = seal.seal(header, memoryview(payload), written_s, into)
    assert len(stored) == len(payload)
    return Stored(packed, stamp.pack(), bytearray(stored))


def _open(seal: Seal, stored: Stored) -> BlockHeader | MissReason:
    stamp = Stamp.unpack(stored.stamp)
    assert stamp is not None
    return seal.open(BlockHeader.unpack(stored.header), stamp, memoryview(stored.payload))


@pytest.fixture
def block() -> tuple[BlockHeader, bytes]:
    payload = bytes(range(256)) * 20
    header = replace(make_chain([1, 2, 3], len(payload), tenant=b"tenant of test..")[2].header)
    return replace(header, checksum=payload_checksum(header, payload)), payload


Block = tuple[BlockHeader, bytes]


@pytest.mark.parametrize("mode", SealMode)
def test_what_was_sealed_opens_as_it_was(ring: KeyRing, block: Block, mode: SealMode) -> None:
    header, payload = block
    stored = _seal(Seal(mode, ring, "ssd"), header, payload)
    assert (stored.payload == payload) is (mode is not SealMode.ENCRYPT)
    assert _open(Seal(mode, ring, "ssd"), stored) == header
    assert stored.payload == payload, "decrypted in place"


def test_a_stamp_tells_codec_and_time(ring: KeyRing, block: Block) -> None:
    for mode, codec in zip(SealMode, Codec, strict=True):
        stamp = Stamp.unpack(_seal(Seal(mode, ring, "ssd"), *block).stamp)
        assert stamp is not None
        assert (stamp.codec, stamp.written_s) == (codec, NOW_S)


def test_no_nonce_comes_twice(ring: KeyRing, block: Block) -> None:
    seal = Seal(SealMode.ENCRYPT, ring, "ssd")
    sealed = [_seal(seal, *block) for _ in range(200)]
    assert len({bytes(stored.payload) for stored in sealed}) == 200
    assert len({stored.stamp for stored in sealed}) == 200


@pytest.mark.parametrize("mode", SealMode)
@pytest.mark.parametrize("name", [each.name for each in fields(BlockHeader)])
def test_each_altered_header_field_is_a_miss(
    ring: KeyRing, block: Block, mode: SealMode, name: str
) -> None:
    seal = Seal(mode, ring, "ssd")
    stored = _seal(seal, *block)
    header = BlockHeader.unpack(stored.header)
    value = getattr(header, name)
    other = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1]) + value[1:]
    stored.header = replace(header, **{name: other}).pack()
    reason = MissReason.CHECKSUM if mode is SealMode.OFF else MissReason.SEAL
    assert _open(seal, stored) is reason


@pytest.mark.parametrize("mode", [SealMode.SIGN, SealMode.ENCRYPT])
@pytest.mark.parametrize(
    "alter",
    [
        lambda stamp: replace(stamp, codec=Codec(3 - stamp.codec)),
        lambda stamp: replace(stamp, codec=Codec.PLAIN),
        lambda stamp: replace(stamp, key_id=stamp.key_id ^ 1),
        lambda stamp: replace(stamp, written_s=stamp.written_s + 1),
        lambda stamp: replace(stamp, nonce=bytes(12)),
    ],
)
def test_each_altered_stamp_field_is_a_miss(
    ring: KeyRing, block: Block, mode: SealMode, alter: Callable[[Stamp], Stamp]
) -> None:
    seal = Seal(mode, ring, "ssd")
    stored = _seal(seal, *block)
    stamp = Stamp.unpack(stored.stamp)
    assert stamp is not None
    stored.stamp = alter(stamp).pack()
    assert _open(seal, stored) is MissReason.SEAL


def test_any_flipped_bit_of_a_stamp_is_found(ring: KeyRing, block: Block) -> None:
    for mode in SealMode:
        packed = _seal(Seal(mode, ring, "ssd"), *block).stamp
        assert len(packed) == STAMP_BYTES
        for bit in range(8 * STAMP_BYTES):
            damaged = bytearray(packed)
            damaged[bit // 8] ^= 1 << bit % 8
            assert Stamp.unpack(damaged) is None
        assert Stamp.unpack(packed[:-1]) is None
        assert Stamp.unpack(bytes(STAMP_BYTES)) is None


@pytest.mark.parametrize("mode", SealMode)
@pytest.mark.parametrize("at", [0, 1, 15, 16, 4096, 5118, 5119])
def test_any_altered_byte_of_a_payload_is_a_miss(
    ring: KeyRing, block: Block, mode: SealMode, at: int
) -> None:
    seal = Seal(mode, ring, "ssd")
    stored = _seal(seal, *block)
    stored.payload[at] ^= 0x40
    assert isinstance(_open(seal, stored), MissReason)


@pytest.mark.parametrize("mode", SealMode)
@pytest.mark.parametrize("cut", [0, 1, 16, 5119])
def test_a_cut_payload_is_a_miss(ring: KeyRing, block: Block, mode: SealMode, cut: int) -> None:
    seal = Seal(mode, ring, "ssd")
    stored = _seal(seal, *block)
    del stored.payload[cut:]
    assert isinstance(_open(seal, stored), MissReason)
    # Nor where the header is made to agree.
    header = BlockHeader.unpack(stored.header)
    stored.header = replace(header, payload_bytes=cut).pack()
    assert isinstance(_open(seal, stored), MissReason)


@pytest.mark.parametrize("mode", SealMode)
def test_payloads_cannot_change_places(ring: KeyRing, mode: SealMode) -> None:
    """Between two hashes of a tenant, and between two tenants."""
    seal = Seal(mode, ring, "ssd")
    payloads = [bytes([n]) * LONG for n in range(3)]
    mine = [block.header for block in make_chain([1, 2], LONG, tenant=b"a" * 16)]
    other = make_chain([1], LONG, tenant=b"b" * 16)[0].header
    headers = [
        replace(header, checksum=payload_checksum(header, payload))
        for header, payload in zip([*mine, other], payloads, strict=True)
    ]
    sealed = [_seal(seal, h, p) for h, p in zip(headers, payloads, strict=True)]
    for source in range(3):
        for place in {0, 1, 2} - {source}:
            # The whole block under another's name, but for what says who it is.
            name = BlockHeader.unpack(sealed[place].header)
            tag = BlockHeader.unpack(sealed[source].header).checksum
            moved = Stored(
                replace(name, checksum=tag).pack(),
                sealed[source].stamp,
                bytearray(sealed[source].payload),
            )
            assert isinstance(_open(seal, moved), MissReason)


def test_a_key_serves_one_purpose(ring: KeyRing, block: Block) -> None:
    for mode in (SealMode.SIGN, SealMode.ENCRYPT):
        stored = _seal(Seal(mode, ring, "ssd"), *block)
        assert _open(Seal(mode, ring, "remote"), stored) is MissReason.SEAL


def test_another_key_of_the_same_name_opens_nothing(tmp_path: Path, block: Block) -> None:
    for mode in (SealMode.SIGN, SealMode.ENCRYPT):
        stored = _seal(Seal(mode, _ring(tmp_path, f"a {KEY_A}"), "ssd"), *block)
        wrong = Seal(mode, _ring(tmp_path, f"a {KEY_B}"), "ssd")
        assert _open(wrong, stored) is MissReason.SEAL


@pytest.mark.parametrize("written", SealMode)
@pytest.mark.parametrize("mode", SealMode)
def test_a_mode_serves_no_less_than_it_demands(
    ring: KeyRing, block: Block, written: SealMode, mode: SealMode
) -> None:
    stored = _seal(Seal(written, ring, "ssd"), *block)
    result = _open(Seal(mode, ring, "ssd"), stored)
    assert result == (block[0] if written.codec >= mode.codec else MissReason.SEAL)


@pytest.mark.parametrize("written", SealMode)
@pytest.mark.parametrize("mode", SealMode)
def test_what_may_be_opened_is_told_from_what_is_spoiled(
    tmp_path: Path, ring: KeyRing, block: Block, written: SealMode, mode: SealMode
) -> None:
    stored = _seal(Seal(written, ring, "ssd"), *block)
    stamp = Stamp.unpack(stored.stamp)
    assert stamp is not None
    is_enough = written.codec >= mode.codec
    assert Seal(mode, ring, "ssd").may_open(stamp) is is_enough
    other = Seal(mode, _ring(tmp_path, f"b {KEY_B}"), "ssd")
    assert other.may_open(stamp) is (is_enough and written is SealMode.OFF)


def test_without_keys_only_plain_blocks_are_served(ring: KeyRing, block: Block) -> None:
    bare = Seal(SealMode.OFF, None, "ssd")
    assert _open(bare, _seal(bare, *block)) == block[0]
    for mode in (SealMode.SIGN, SealMode.ENCRYPT):
        assert _open(bare, _seal(Seal(mode, ring, "ssd"), *block)) is MissReason.SEAL
        with pytest.raises(AssertionError):
            Seal(mode, None, "ssd")


def test_a_key_is_rotated_and_retired_while_running(tmp_path: Path, block: Block) -> None:
    path = _write(tmp_path / "keys", f"a {KEY_A}\n")
    ring = KeyRing.load(path)
    seal = Seal(SealMode.ENCRYPT, ring, "ssd")
    old, kept = _seal(seal, *block), _seal(seal, *block)
    _write(path, f"# newest first\nb {KEY_B}\n\na {KEY_A}\n")
    ring.reload()
    new = _seal(seal, *block)
    assert old.stamp[4:8] != new.stamp[4:8], "the first key seals"
    assert _open(seal, old) == _open(seal, new) == block[0]
    _write(path, f"b {KEY_B}\n")
    ring.reload()
    assert _open(seal, kept) is MissReason.SEAL
    assert _open(seal, _seal(seal, *block)) == block[0]


def test_a_bad_file_leaves_the_keys_as_they_were(tmp_path: Path, block: Block) -> None:
    path = _write(tmp_path / "keys", f"a {KEY_A}")
    ring = KeyRing.load(path)
    seal = Seal(SealMode.ENCRYPT, ring, "ssd")
    stored = _seal(seal, *block)
    for text in ("", "a", f"b {KEY_B}\na bad"):
        _write(path, text)
        with pytest.raises(StartError):
            ring.reload()
    path.unlink()
    with pytest.raises(StartError):
        ring.reload()
    assert _open(seal, stored) == block[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no key"),
        ("# only a comment\n", "has no key"),
        (KEY_A, "line 1"),
        (f"\n\na {KEY_A[:-1]}", "line 3"),
        (f"a {KEY_A}0", "line 1"),
        (f"a {KEY_A} {KEY_B}", "line 1"),
        (f"a/b {KEY_A}", "line 1"),
        (f"{'n' * 65} {KEY_A}", "line 1"),
        (f"a {KEY_A[:-1]}g", "line 1"),
        (f"a {KEY_A}\na {KEY_B}", "line 2 of .* repeats the name of an earlier key"),
        (f"a {KEY_A}\nb {KEY_A}", "line 2 of .* repeats"),
    ],
)
def test_a_file_that_is_none_is_refused_without_its_keys(
    tmp_path: Path, text: str, problem: str
) -> None:
    path = _write(tmp_path / "keys", text)
    with pytest.raises(StartError, match=problem) as refused:
        KeyRing.load(path)
    assert refused.value.field == "seal.key_file"
    for key in (KEY_A, KEY_B, KEY_C):
        assert key[:8] not in str(refused.value)


def test_a_file_that_others_read_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "keys", f"a {KEY_A}")
    path.chmod(0o644)
    with pytest.raises(StartError, match=r"seal\.key_file.*chmod 600"):
        KeyRing.load(path)


def test_keys_show_nowhere(tmp_path: Path, block: Block) -> None:
    ring = _ring(tmp_path, f"a {KEY_A}", f"b {KEY_B}")
    seal = Seal(SealMode.ENCRYPT, ring, "ssd")
    _seal(seal, *block)
    for shown in (repr(ring), repr(ring.value), repr(seal), str(ring)):
        assert KEY_A[:8] not in shown.lower()
        assert repr(bytes.fromhex(KEY_A)[:4])[2:-1] not in shown
