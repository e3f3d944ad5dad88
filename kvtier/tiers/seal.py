"""Signs or encrypts blocks at rest with AES-256-GCM.

Theory
------
A stored block is a header, a *stamp* and a payload. The stamp says how and when the block was
written. In a sealed block, the header's checksum field holds the GCM tag. The tag covers the
header's identity, the stamp and the payload, so an altered bit, a payload under another block's or
tenant's header, or a stamp of another time is a miss.

Each key of the key file is a master key. HKDF-SHA256 derives one key per purpose from it, so that
SSD contents reveal nothing about Redis contents, and values cannot be carried over.

Rules
-----
* Nonces are 96 random bits, so no counter has to survive a crash or be shared between nodes. Two
  blocks of one key must not draw the same nonce: after 2**32 blocks the odds are 2**-33, which is
  NIST's bound (SP 800-38D). At 1 GB/s and 1 MiB per block that is 52 days of writing: rotate keys
  monthly.
* The mode sets the least protection that is served. Raising it takes effect at once for reads:
  blocks written earlier with less protection are misses.
* No message, log line or repr contains a key.
* The stamp of a plain block has no tag; a CRC detects a corrupted one.
"""

import hashlib
import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.core.identity import BlockHeader, payload_checksum
from kvtier.errors import StartError
from kvtier.secret import Secret, read_secret, secret_lines
from kvtier.tiers.base import MissReason

__all__ = ["STAMP_BYTES", "Codec", "KeyRing", "Seal", "SealMode", "Stamp"]

_STAMP = struct.Struct("<B3xIQ12s")  # codec, key id, write time, nonce; followed by their CRC-32
STAMP_BYTES = 32
"""Size of a stamp, which follows the header on SSD and in Redis."""
assert _STAMP.size + 4 == STAMP_BYTES

_NONCE_BYTES = 12
_NO_NONCE = bytes(_NONCE_BYTES)
_KEY_BYTES = 32
_FIELD = "seal.key_file"
_LINE = re.compile(r"([\w.-]{1,64})[ \t]+([0-9A-Fa-f]{64})", re.ASCII)


class Codec(IntEnum):
    """How the payload of a stored block is protected."""

    PLAIN = 0
    SIGNED = 1
    ENCRYPTED = 2


class SealMode(StrEnum):
    """What a tier writes, and the least protection that it serves."""

    OFF = "off"
    """Writes plain blocks; serves every block that it can open."""
    SIGN = "sign"
    """Signs blocks; a block that is not signed or encrypted is a miss."""
    ENCRYPT = "encrypt"
    """Encrypts blocks; any other block is a miss."""

    @property
    def codec(self) -> Codec:
        """Return the codec for writing, which is also the least that is served."""
        return Codec(list(SealMode).index(self))


@dataclass(frozen=True, slots=True)
class Stamp:
    """How and when a stored block was written. ``key_id`` and ``nonce`` are 0 for a plain block."""

    codec: Codec
    key_id: int
    written_s: int
    nonce: bytes

    def pack(self) -> bytes:
        """Return the stamp as ``STAMP_BYTES`` bytes."""
        packed = _STAMP.pack(self.codec, self.key_id, self.written_s, self.nonce)
        return packed + zlib.crc32(packed).to_bytes(4, "little")

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> "Stamp | None":
        """Unpack a stamp; None if the bytes are not a stamp."""
        if len(packed) < STAMP_BYTES:
            return None
        codec, key_id, written_s, nonce = _STAMP.unpack_from(packed)
        crc = int.from_bytes(packed[_STAMP.size : STAMP_BYTES], "little")
        if codec > Codec.ENCRYPTED or any(packed[1:4]) or crc != zlib.crc32(packed[: _STAMP.size]):
            return None
        return cls(Codec(codec), key_id, written_s, nonce)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys of one version of the file, by id; the first one seals."""

    first_id: int
    by_id: Mapping[int, bytes] = field(repr=False)


class KeyRing(Secret[_Keys]):
    """The master keys of a key file. ``value`` is the same object until the keys change."""

    def __repr__(self) -> str:
        return f"KeyRing({len(self.value.by_id)} keys)"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file. Raises StartError("seal.key_file", …)."""
        return cls("seal_keys", lambda: (path,), partial(_read_keys, path))


def _read_keys(path: Path) -> _Keys:
    by_id: dict[int, bytes] = {}
    names: set[str] = set()
    for number, line in secret_lines(read_secret(path, _FIELD)):
        match = _LINE.fullmatch(line)
        where = f"line {number} of {path}"
        if not match:
            raise StartError(
                _FIELD, f"{where} is not a key", "write a name, a space and 64 hexadecimal digits"
            )
        name, key = match[1], bytes.fromhex(match[2])
        if name in names:
            raise StartError(
                _FIELD, f"{where} repeats the name of an earlier key", "use another name"
            )
        if _key_id(key) in by_id:
            raise StartError(_FIELD, f"{where} repeats an earlier key or its id", "make a new key")
        names.add(name)
        by_id[_key_id(key)] = key
    if not by_id:
        raise StartError(
            _FIELD,
            f"{path} has no key",
            'write one, with the output of: echo "first $(openssl rand -hex 32)"',
        )
    return _Keys(next(iter(by_id)), by_id)


def _key_id(key: bytes) -> int:
    """Return the id of a key in stamps: 4 bytes of its SHA-256, which do not reveal the key.

    It is not derived from the name: a wrong key under a right name would make sound blocks look
    altered.
    """
    digest = hashlib.sha256(b"kvtier.key_id\0" + key).digest()
    return int.from_bytes(digest[:4], "little")


class Seal:
    """Seals and opens the blocks of one tier. Thread-safe.

    ``purpose`` ("ssd", "remote") separates the keys of tiers. Without a ``ring`` the mode is OFF.
    """

    def __init__(self, mode: SealMode, ring: KeyRing | None, purpose: str) -> None:
        assert ring is not None or mode is SealMode.OFF, "to seal takes keys"
        self._mode = mode
        self._ring = ring
        self._purpose = purpose
        self._drawn: tuple[_Keys | None, Mapping[int, AES]] = (None, {})

    @property
    def needs_buffer(self) -> bool:
        """Return whether sealing writes ciphertext into a buffer as long as the payload."""
        return self._mode is SealMode.ENCRYPT

    def seal(
        self, header: BlockHeader, payload: memoryview, written_s: int, into: memoryview | None
    ) -> tuple[bytes, Stamp, memoryview]:
        """Return the packed header, the stamp and the bytes to store. Changes only ``into``.

        ``into`` is at least as long as the payload if ``needs_buffer``. In the other modes the
        bytes to store are the payload itself.
        """
        codec = self._mode.codec
        if codec is Codec.PLAIN:
            return header.pack(), Stamp(codec, 0, written_s, _NO_NONCE), payload
        assert self._ring is not None
        keys = self._ring.value
        stamp = Stamp(codec, keys.first_id, written_s, os.urandom(_NONCE_BYTES))
        encryptor = Cipher(self._keys_of(keys)[keys.first_id], GCM(stamp.nonce)).encryptor()
        encryptor.authenticate_additional_data(header.identity() + stamp.pack())
        stored = payload
        if codec is Codec.ENCRYPTED:
            assert into is not None, "ciphertext needs a place"
            stored = into[: len(payload)]
            encryptor.update_into(payload, stored)
        else:
            encryptor.authenticate_additional_data(payload)
        encryptor.finalize()
        return replace(header, checksum=encryptor.tag).pack(), stamp, stored

    def open(
        self, header: BlockHeader, stamp: Stamp, payload: memoryview
    ) -> BlockHeader | MissReason:
        """Verify a block as it was stored; decrypt it in place if it is encrypted.

        Returns the header with the checksum of the plain payload; SEAL if the mode demands more,
        the key is unknown or the tag fails; CHECKSUM if a plain block fails its own. After a miss
        the payload is undefined.
        """
        if stamp.codec < self._mode.codec:
            return MissReason.SEAL
        if stamp.codec is Codec.PLAIN:
            return header if header.matches(payload) else MissReason.CHECKSUM
        key = self._keys_of(self._ring.value).get(stamp.key_id) if self._ring else None
        if key is None or len(payload) != header.payload_bytes:
            return MissReason.SEAL
        decryptor = Cipher(key, GCM(stamp.nonce, header.checksum)).decryptor()
        decryptor.authenticate_additional_data(header.identity() + stamp.pack())
        try:
            if stamp.codec is Codec.ENCRYPTED:
                decryptor.update_into(payload, payload)
            else:
                decryptor.authenticate_additional_data(payload)
            decryptor.finalize()
        except InvalidTag:
            return MissReason.SEAL
        return replace(header, checksum=payload_checksum(header, payload))

    def may_open(self, stamp: Stamp) -> bool:
        """Return whether the mode accepts such a block and its key is known.

        If so, a block that does not open is damaged.
        """
        if stamp.codec < self._mode.codec:
            return False
        if stamp.codec is Codec.PLAIN:
            return True
        return self._ring is not None and stamp.key_id in self._ring.value.by_id

    def _keys_of(self, keys: _Keys) -> Mapping[int, AES]:
        """Return the keys derived for this purpose, derived again after the file has changed."""
        drawn_from, drawn = self._drawn
        if drawn_from is not keys:
            drawn = {key_id: AES(self._draw(key)) for key_id, key in keys.by_id.items()}
            self._drawn = (keys, drawn)
        return drawn

    def _draw(self, key: bytes) -> bytes:
        purpose = b"kvtier.seal\0" + self._purpose.encode()
        return HKDF(SHA256(), length=_KEY_BYTES, salt=None, info=purpose).derive(key)
