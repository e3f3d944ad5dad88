"""Run by the Python of an environment with vLLM: blocks are found in the tensors that it makes.

In each of its layouts, also where pages are padded and where attention has smaller blocks, by its
own allocation; what must come out is read through its own view of a block.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvtier.connectors.kit.copies import HostCopier
from kvtier.connectors.kit.pages import Pages

NUM_BLOCKS, BLOCK_TOKENS = 7, 32
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]


def specs() -> Iterator[tuple[Any, int | None]]:
    """Yield what vLLM keeps of a layer, and how many tokens attention has in a block."""
    about = {"block_size": BLOCK_TOKENS, "head_size": 16}
    yield FullAttentionSpec(**about, num_kv_heads=2, dtype=torch.bfloat16), None
    yield FullAttentionSpec(**about, num_kv_heads=2, dtype=torch.bfloat16), BLOCK_TOKENS // 2
    yield FullAttentionSpec(**about, num_kv_heads=1, dtype=torch.float32), None
    yield MLAAttentionSpec(**about, num_kv_heads=1, dtype=torch.bfloat16), None
    if "page_size_padded" in inspect.signature(FullAttentionSpec).parameters:
        padded = FullAttentionSpec(
            **about, num_kv_heads=1, dtype=torch.bfloat16, page_size_padded=4096
        )
        yield padded, None


def allocate(spec: Any, layout: KVCacheLayout, kernel_tokens: int | None) -> dict[str, Any]:
    num_layers = len(LAYERS)
    strides = compute_layout_strides(spec, NUM_BLOCKS, num_layers, layout)
    size = num_layers * NUM_BLOCKS * spec.page_size_bytes
    placed = KVCacheTensor(
        size=size, layers=LAYERS, layer_stride=strides[0], block_stride=strides[1]
    )
    config = KVCacheConfig(NUM_BLOCKS, [placed], [KVCacheGroupSpec(LAYERS, spec)])
    sizes = None if kernel_tokens is None else [kernel_tokens]
    return dict(allocate_kv_cache(config, torch.device("cpu"), layout, sizes))


def wanted(tensors: dict[str, Any], layout: KVCacheLayout, block: int) -> bytes:
    """Return a block's bytes, with the dimensions of each page in the layout's order."""
    order = [each - 1 for each in layout.stride_order if each > 1]
    parts = []
    for tensor in tensors.values():
        page = tensor.unflatten(0, (NUM_BLOCKS, -1))[block]
        parts.append(page.permute(0, *order).contiguous().view(torch.uint8).numpy().tobytes())
    return b"".join(parts)


def look(spec: Any, layout: KVCacheLayout, kernel_tokens: int | None) -> bool:
    """Check one combination; False for one that vLLM does not make."""
    try:
        tensors = allocate(spec, layout, kernel_tokens)
    except (ValueError, AssertionError):
        return False
    for tensor in tensors.values():
        noise = torch.randint(0, 256, (*tensor.shape, tensor.element_size())).to(torch.uint8)
        tensor.copy_(noise.view(tensor.dtype).squeeze(-1))
    pages = Pages(tensors, NUM_BLOCKS)
    assert len(pages.planes) == 1
    for block in range(NUM_BLOCKS):
        slot = memoryview(bytearray(pages.block_bytes))
        list(HostCopier(pages).gather([[block]], [slot]))
        assert bytes(slot) == wanted(tensors, layout, block), (layout, spec, block)
    copies = HostCopier(pages)
    copies.scatter([slot], [[0]])
    assert wanted(tensors, layout, 0) == bytes(slot)
    return True


def main() -> None:
    torch.manual_seed(1)
    made = [look(spec, layout, tokens) for spec, tokens in specs() for layout in KVCacheLayout]
    assert sum(made) >= 20, made
    print(f"{vllm.__version__}: ok, {sum(made)} of {len(made)}")


if __name__ == "__main__":
    main()
