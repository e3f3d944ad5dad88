"""The layout of a block's bytes, as the engine that computes them declares it.

A layout is never inferred from a shape: two layouts can have equal shapes and different strides. An
engine names its layout and version, both are part of the key space, and the daemon refuses a layout
it does not know at registration.
"""

from dataclasses import dataclass

__all__ = ["KNOWN_LAYOUTS", "KVLayout", "paged_layout"]

KNOWN_LAYOUTS = frozenset(
    {
        ("paged", 1),
        ("vllm-chunk", 1),
        ("vllm-lbhnc", 1),
        ("vllm-lbnhc", 1),
        ("vllm-lhbnc", 1),
        ("vllm-blhnc", 1),
        ("vllm-blnhc", 1),
        ("vllm-bhlnc", 1),
    }
)
"""Layouts the daemon accepts, as (name, version).

``paged`` 1: engine blocks in token order, each (layer, K/V, token, KV head, head dim), contiguous.
``vllm-chunk`` 1: a row of vLLM's CPU tier, with the pages of all workers arranged as configured.
``vllm-lbhnc`` 1: engine blocks in token order, each (layer, page); the page has the dimensions of
vLLM's backend, in the order of the name without layer and block. The other five follow the same
scheme."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of one block: ``block_tokens`` tokens of all layers in ``block_bytes`` bytes."""

    name: str
    version: int
    block_tokens: int
    block_bytes: int
    dtype: str
    detail: str
    """Everything else that determines the meaning of the bytes, in a canonical, readable form."""

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_bytes <= 0:
            raise ValueError(f"block_tokens and block_bytes must be positive: {self}")


def paged_layout(
    *,
    block_tokens: int,
    engine_block_tokens: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    dtype_bytes: int,
) -> KVLayout:
    """Return the layout of the integrated engine, with several engine blocks in each block.

    Raises ValueError unless a block is a whole number of engine blocks.
    """
    if block_tokens % engine_block_tokens:
        raise ValueError(f"{block_tokens} is not a multiple of {engine_block_tokens}")
    return KVLayout(
        name="paged",
        version=1,
        block_tokens=block_tokens,
        block_bytes=block_tokens * num_layers * 2 * num_kv_heads * head_dim * dtype_bytes,
        dtype=dtype,
        detail=(
            f"{block_tokens // engine_block_tokens}x(layer={num_layers},kv=2,"
            f"token={engine_block_tokens},head={num_kv_heads},dim={head_dim})"
        ),
    )
