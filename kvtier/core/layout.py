"""How the bytes of a block are arranged, as the engine that made them declares it.

Nothing is ever inferred from a shape: two layouts can have equal shapes and different strides, so
an engine names its layout and version, both travel in the key space, and a name the daemon does
not know is refused at registration.
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
``vllm-chunk`` 1: a row of vLLM's CPU tier, as its configuration arranges the pages of all workers.
``vllm-lbhnc`` 1: engine blocks in token order, each (layer, page), a page as vLLM's backend has it:
its dimensions in the order of the name, layer and block left out. So are the five others.
"""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The arrangement of one block: ``block_tokens`` tokens, all layers, ``block_bytes`` bytes."""

    name: str
    version: int
    block_tokens: int
    block_bytes: int
    dtype: str
    detail: str
    """Everything else that fixes the meaning of the bytes, in a canonical, readable form."""

    def __post_init__(self) -> None:
        if self.block_tokens <= 0 or self.block_bytes <= 0:
            raise ValueError(f"a block has tokens and bytes, got {self}")


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
    """Describe a block of the integrated engine: ``block_tokens / engine_block_tokens`` blocks.

    Raises ValueError where a block is no whole number of engine blocks.
    """
    if block_tokens % engine_block_tokens:
        raise ValueError(f"{block_tokens} tokens are no multiple of {engine_block_tokens}")
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
