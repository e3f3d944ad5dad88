"""What makes two blocks the same block.

Theory
------
A block hash names content: SHA-256 over (parent hash, token ids, extra keys), cut to 16 bytes and
chained from a root. The root is drawn from the *key space*, everything that makes bytes
comparable, and from the tenant's salt, so that blocks of another model, dtype, layout or tenant
have other hashes: no comparison can be forgotten, because there is nothing to compare.

Every stored block carries a header that repeats its identity, and a checksum over that header and
the payload. Readers check both, so a block that is torn, rotten, stale or someone else's is a miss.

Rules
-----
* Content only: no path, no name, no process-local hash. The same fields give the same key on any
  node, in any process, whatever ``PYTHONHASHSEED`` says; a golden test pins the values.
* A part that is not known makes the engine's blocks uncacheable. There is no default for it.
"""

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NewType

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.core.layout import KVLayout

__all__ = [
    "EVERYTHING",
    "FORMAT_VERSION",
    "HASH_BYTES",
    "HEADER_BYTES",
    "NO_TENANT",
    "PACKED_HEADER",
    "BlockHash",
    "BlockHeader",
    "HeaderError",
    "Headers",
    "KeySpace",
    "Selection",
    "chain_root",
    "hash_blocks",
    "pack_headers",
    "payload_checksum",
    "split_hashes",
    "tenant_digest",
    "unpack_headers",
]

BlockHash = NewType("BlockHash", bytes)
"""The content identity of a block and of everything before it: 16 bytes."""

FORMAT_VERSION = 1
"""Version of the key derivation and of the header; part of both."""

HASH_BYTES = 16
"""128 bits of SHA-256: finding a collision on purpose takes about 2**64 tries."""

NO_TENANT = bytes(HASH_BYTES)
"""The tenant digest of requests without a salt."""


@dataclass(frozen=True)
class KeySpace:
    """Everything that makes the bytes of two blocks comparable.

    ``weights`` is a content fingerprint, never a path or a model name; ``model_config`` is the
    whole configuration in canonical JSON, RoPE parameters included.
    """

    weights: bytes
    model_config: str
    layout: KVLayout
    compute_dtype: str
    engine: str
    adapter: bytes = b""
    codec: str = "raw"
    parallel_size: int = 1
    parallel_rank: int = 0

    def __post_init__(self) -> None:
        if len(self.weights) < HASH_BYTES:
            raise ValueError("the weights' fingerprint is unknown: blocks are not cacheable")
        if not 0 <= self.parallel_rank < self.parallel_size:
            raise ValueError(f"rank {self.parallel_rank} of {self.parallel_size}")

    @cached_property
    def digest(self) -> bytes:
        """Return the 16 bytes that stand for this key space."""
        fields = asdict(self) | {
            "weights": self.weights.hex(),
            "adapter": self.adapter.hex(),
            "format_version": FORMAT_VERSION,
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(b"kvtier.key_space\0" + text.encode()).digest()[:HASH_BYTES]


def tenant_digest(salt: str | None) -> bytes:
    """Return the 16 bytes that separate a tenant's blocks; ``NO_TENANT`` without a salt."""
    if not salt:
        return NO_TENANT
    return hashlib.sha256(b"kvtier.tenant\0" + salt.encode()).digest()[:HASH_BYTES]


def chain_root(key_space: bytes, tenant: bytes) -> BlockHash:
    """Return the parent hash of a first block in this key space for this tenant."""
    assert len(key_space) == len(tenant) == HASH_BYTES
    digest = hashlib.sha256(b"kvtier.root\0" + key_space + tenant).digest()
    return BlockHash(digest[:HASH_BYTES])


def hash_blocks(
    parent: BlockHash,
    token_ids: Sequence[int],
    block_tokens: int,
    extra_keys: Mapping[int, bytes] | None = None,
) -> list[BlockHash]:
    """Chain the hashes of the full blocks of ``token_ids`` from ``parent``; a tail has none.

    ``extra_keys`` maps a block's index to bytes that also decide its content (a media digest).
    """
    # 0.7 ms for 128k tokens, where numpy takes 2.4 ms to read a list; refuses what is no u32.
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    tokens = numbers.tobytes()
    stride = 4 * block_tokens
    hashes: list[BlockHash] = []
    sha256 = hashlib.sha256
    for index in range(len(tokens) // stride):
        content = parent + tokens[index * stride : (index + 1) * stride]
        if extra_keys and index in extra_keys:
            content += b"\0extra\0" + extra_keys[index]
        parent = BlockHash(sha256(content).digest()[:HASH_BYTES])
        hashes.append(parent)
    return hashes


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Cut a concatenation of block hashes, as it travels in messages, into hashes."""
    return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]


class HeaderError(ValueError):
    """Bytes that are no valid header; the first argument is the miss reason to count."""


# magic, format, codec, position, key space, tenant, block hash, parent hash, payload bytes
_IDENTITY = struct.Struct("<8sHHI16s16s16s16sQ")
_MAGIC = b"KVTBLOCK"
_CODEC_RAW = 0
_CHECKSUM_BYTES = 16
HEADER_BYTES = 128
"""A header's size, padded with zeros; the same before a block on SSD, in Redis and in a message."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The identity of one stored block, and the checksum of its header and payload."""

    key_space: bytes
    tenant: bytes
    block_hash: BlockHash
    parent_hash: BlockHash
    position: int
    """Index of the block in its chain: it holds tokens [position * block_tokens, …)."""
    payload_bytes: int
    checksum: bytes = b""

    def identity(self) -> bytes:
        """Return the packed fields that the checksum covers."""
        return _IDENTITY.pack(
            _MAGIC,
            FORMAT_VERSION,
            _CODEC_RAW,
            self.position,
            self.key_space,
            self.tenant,
            self.block_hash,
            self.parent_hash,
            self.payload_bytes,
        )

    def pack(self) -> bytes:
        """Return the header as ``HEADER_BYTES`` bytes."""
        assert len(self.checksum) == _CHECKSUM_BYTES, "a header is packed once it has a checksum"
        return (self.identity() + self.checksum).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, packed: bytes | memoryview) -> "BlockHeader":
        """Read a header back; raises HeaderError("magic" | "format" | "truncated")."""
        if len(packed) < HEADER_BYTES:
            raise HeaderError("truncated")
        (magic, version, codec, position, key_space, tenant, block_hash, parent, payload_bytes) = (
            _IDENTITY.unpack_from(packed)
        )
        if magic != _MAGIC:
            raise HeaderError("magic")
        if version != FORMAT_VERSION or codec != _CODEC_RAW:
            raise HeaderError("format")
        checksum = bytes(packed[_IDENTITY.size : _IDENTITY.size + _CHECKSUM_BYTES])
        return cls(
            key_space,
            tenant,
            BlockHash(block_hash),
            BlockHash(parent),
            position,
            payload_bytes,
            checksum,
        )

    def matches(self, payload: memoryview) -> bool:
        """Tell whether ``payload`` is, byte for byte, what was stored under this header."""
        return len(payload) == self.payload_bytes and self.checksum == payload_checksum(
            self, payload
        )


PACKED_HEADER = np.dtype(
    [
        ("start", "V12"),
        ("position", "<u4"),
        ("space", "<u8", (4,)),
        ("block_hash", "<u8", (2,)),
        ("parent_hash", "<u8", (2,)),
        ("payload_bytes", "<u8"),
        ("end", "V40"),
    ]
)
"""A packed header as fields; ``space`` is key space and tenant."""

Headers = npt.NDArray[np.void]
"""Many packed headers, as an array of ``PACKED_HEADER``."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Whose blocks: those of a key space, of a tenant, of both; all where neither is named."""

    key_space: bytes = b""
    tenant: bytes = b""

    def __post_init__(self) -> None:
        for digest in (self.key_space, self.tenant):
            if len(digest) not in {0, HASH_BYTES}:
                raise ValueError(f"a digest of {len(digest)} bytes, not {HASH_BYTES}")

    @property
    def is_all(self) -> bool:
        """Tell whether every block is meant."""
        return not (self.key_space or self.tenant)

    def has(self, key_space: bytes, tenant: bytes) -> bool:
        """Tell whether the blocks of this key space and tenant are meant."""
        return self.key_space in {b"", key_space} and self.tenant in {b"", tenant}

    def mask(self, spaces: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Tell which rows of a ``space`` field are meant."""
        meant = np.ones(len(spaces), dtype=bool)
        for digest, columns in ((self.key_space, slice(0, 2)), (self.tenant, slice(2, 4))):
            if digest:
                meant &= (spaces[:, columns] == np.frombuffer(digest, "<u8")).all(axis=1)
        return meant


EVERYTHING = Selection()
"""Every block of everyone."""


def pack_headers(headers: Iterable[BlockHeader]) -> Headers:
    """Return headers as an array."""
    return np.frombuffer(b"".join(header.pack() for header in headers), PACKED_HEADER)


def unpack_headers(batches: Iterable[Headers]) -> list[BlockHeader]:
    """Return the headers of several arrays, one after the other."""
    return [BlockHeader.unpack(packed.tobytes()) for batch in batches for packed in batch]


def payload_checksum(header: BlockHeader, *payload: memoryview | bytes) -> bytes:
    """Return the xxh3-128 of a header's identity and its payload, given whole or in pieces.

    Binding the identity means that the right bytes under the wrong hash fail as well.
    """
    digest = xxhash.xxh3_128(header.identity())
    for piece in payload:
        digest.update(piece)
    return digest.digest()
