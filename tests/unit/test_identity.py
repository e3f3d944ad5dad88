"""Golden values: the same fields give the same keys on any node, in any process, for ever."""

import os
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest

from kvtier.core.identity import (
    HEADER_BYTES,
    NO_TENANT,
    BlockHash,
    BlockHeader,
    HeaderError,
    KeySpace,
    chain_root,
    hash_blocks,
    payload_checksum,
    split_hashes,
    tenant_digest,
)
from kvtier.core.layout import KVLayout

LAYOUT = KVLayout("paged", 1, 64, 2_949_120, "float32", "4x(layer=30,kv=2,token=16,head=3,dim=64)")
SPACE = KeySpace(
    weights=bytes(range(32)),
    model_config='{"rope_theta":10000.0}',
    layout=LAYOUT,
    compute_dtype="float32",
    engine="kvtier-1",
)
ROOT = chain_root(SPACE.digest, NO_TENANT)
HASHES = hash_blocks(ROOT, range(200), 64)
HEADER = BlockHeader(SPACE.digest, NO_TENANT, HASHES[1], HASHES[0], 1, 5)


def test_golden_key_space():
    assert SPACE.digest.hex() == "ec61510a6af50229ba514122b078c572"


def test_golden_tenant_and_roots():
    assert tenant_digest("acme").hex() == "4eb6b0bd75f5fc22a3f9fe1653d67718"
    assert ROOT.hex() == "ae75cfb47fadef81b5b73237b9b11d63"
    assert chain_root(SPACE.digest, tenant_digest("acme")).hex() == (
        "aa61e53d17661c7ab01d00c45f8791b9"
    )


def test_golden_block_hashes():
    assert [block_hash.hex() for block_hash in HASHES] == [
        "a36fa673f61f6934867355dc734a0800",
        "b8f9ef1249a9b6fdcb7835b63c63ce35",
        "b86e8ea7e2575893752bcab09104c068",
    ]


def test_golden_header():
    assert payload_checksum(HEADER, b"hello").hex() == "b933e2089ee1a0114b3751cf06c0281f"
    packed = replace(HEADER, checksum=payload_checksum(HEADER, b"hello")).pack()
    assert packed.hex() == (
        "4b5654424c4f434b0100000001000000"
        "ec61510a6af50229ba514122b078c572"
        "00000000000000000000000000000000"
        "b8f9ef1249a9b6fdcb7835b63c63ce35"
        "a36fa673f61f6934867355dc734a0800"
        "0500000000000000"
        "b933e2089ee1a0114b3751cf06c0281f"
        "0000000000000000"
        "0000000000000000"
        "0000000000000000"
    ), packed.hex()


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_another_process_with_another_hash_seed_gives_the_same(seed):
    code = (
        "from kvtier.core.identity import *; from kvtier.core.layout import KVLayout;"
        f"space = {SPACE!r}; root = chain_root(space.digest, NO_TENANT);"
        "print(space.digest.hex(), hash_blocks(root, range(200), 64)[-1].hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [SPACE.digest.hex(), HASHES[-1].hex()]


OTHER_FIELDS = {
    "weights": bytes(32),
    "model_config": '{"rope_theta":500000.0}',
    "layout": replace(LAYOUT, version=2),
    "compute_dtype": "bfloat16",
    "engine": "kvtier-2",
    "adapter": b"adapter",
    "codec": "zstd",
    "parallel_size": 2,
    "parallel_rank": 1,
}


@pytest.mark.parametrize("field", [field.name for field in fields(KeySpace)])
def test_every_field_makes_another_key_space(field):
    size = {"parallel_size": 2} if field == "parallel_rank" else {}
    assert replace(SPACE, **size, **{field: OTHER_FIELDS[field]}).digest != SPACE.digest


@pytest.mark.parametrize("field", [field.name for field in fields(KVLayout)])
def test_every_field_of_the_layout_makes_another_key_space(field):
    value = getattr(LAYOUT, field)
    other = value + 1 if isinstance(value, int) else value + "!"
    assert replace(SPACE, layout=replace(LAYOUT, **{field: other})).digest != SPACE.digest


def test_blocks_without_known_weights_are_not_cacheable():
    with pytest.raises(ValueError, match="not cacheable"):
        replace(SPACE, weights=b"")
    with pytest.raises(ValueError, match="rank"):
        replace(SPACE, parallel_rank=1)


def test_an_empty_salt_is_none():
    assert tenant_digest(None) == tenant_digest("") == NO_TENANT
    assert tenant_digest("a") != tenant_digest("b")


def test_a_hash_depends_on_everything_before_it():
    assert hash_blocks(ROOT, range(64), 64) == HASHES[:1]
    assert hash_blocks(HASHES[0], range(64, 128), 64) == HASHES[1:2]
    assert not set(hash_blocks(ROOT, [7, *range(1, 200)], 64)) & set(HASHES)
    assert not set(hash_blocks(ROOT, range(200), 32)) & set(HASHES)


def test_a_tail_has_no_hash():
    assert len(hash_blocks(ROOT, range(127), 64)) == 1
    assert hash_blocks(ROOT, [], 64) == []


def test_extra_keys_change_their_block_and_those_after_it():
    other = hash_blocks(ROOT, range(200), 64, {1: b"image"})
    assert other[0] == HASHES[0]
    assert other[1].hex() == "3f0addf1d674378e96fa8ae2c2bdc91d"
    assert other[2] != HASHES[2]


def test_token_ids_may_come_in_any_integer_type():
    assert hash_blocks(ROOT, np.arange(200, dtype=np.int64), 64) == HASHES


def test_joined_hashes_come_apart_again():
    assert split_hashes(b"".join(HASHES)) == HASHES


def test_a_header_comes_back():
    header = replace(HEADER, checksum=payload_checksum(HEADER, b"hello"))
    assert len(header.pack()) == HEADER_BYTES
    assert BlockHeader.unpack(header.pack()) == header
    assert header.matches(memoryview(b"hello"))
    assert not header.matches(memoryview(b"hellp"))
    assert not header.matches(memoryview(b"hello!"))


@pytest.mark.parametrize(
    "change",
    [
        {"key_space": bytes(16)},
        {"tenant": b"other tenant...."},
        {"block_hash": BlockHash(bytes(16))},
        {"parent_hash": BlockHash(bytes(16))},
        {"position": 2},
    ],
)
def test_the_right_bytes_under_another_identity_do_not_match(change):
    header = replace(HEADER, checksum=payload_checksum(HEADER, b"hello"))
    assert not replace(header, **change).matches(memoryview(b"hello"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packed: packed[:-1], "truncated"),
        (lambda packed: b"X" + packed[1:], "magic"),
        (lambda packed: packed[:8] + b"\xff" + packed[9:], "format"),
        (lambda packed: packed[:10] + b"\xff" + packed[11:], "format"),
    ],
)
def test_a_bad_header_says_what_is_wrong(damage, reason):
    packed = replace(HEADER, checksum=bytes(16)).pack()
    with pytest.raises(HeaderError, match=reason):
        BlockHeader.unpack(damage(packed))
