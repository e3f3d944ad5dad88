import pytest

from kvtier.core.layout import KVLayout, paged_layout

SHAPE = {
    "engine_block_tokens": 16,
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "dtype": "float32",
    "dtype_bytes": 4,
}


def test_a_block_is_whole_engine_blocks():
    layout = paged_layout(block_tokens=64, **SHAPE)
    assert layout.block_bytes == 64 * 30 * 2 * 3 * 64 * 4
    assert layout.detail == "4x(layer=30,kv=2,token=16,head=3,dim=64)"


def test_a_block_that_cuts_an_engine_block_is_refused():
    with pytest.raises(ValueError, match="not a multiple of 16"):
        paged_layout(block_tokens=40, **SHAPE)


def test_a_block_has_tokens_and_bytes():
    with pytest.raises(ValueError, match="must be positive"):
        KVLayout("paged", 1, 0, 4096, "float32", "")
    with pytest.raises(ValueError, match="must be positive"):
        KVLayout("paged", 1, 64, 0, "float32", "")
