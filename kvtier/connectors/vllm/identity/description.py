"""What a worker's blocks are, as far as that is known where they lie. Needs vLLM."""

import hashlib
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

import torch
from vllm import envs

from kvtier.connectors.vllm.identity.facts import BlockFacts, block_ratio, model_config
from kvtier.connectors.vllm.refusal import layer_specs
from kvtier.connectors.vllm.release import instruction_set, layout_name, release
from kvtier.connectors.vllm.transfer.pages import Pages
from kvtier.core.layout import KVLayout

__all__ = ["arrangement", "describe"]


def describe(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor], pages: Pages
) -> BlockFacts:
    """Return what the blocks in ``tensors`` are. Raises ValueError where that cannot be told."""
    whole_spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    spec = layer_specs(whole_spec)[0]
    ratio = block_ratio(spec.block_size)
    arranged = arrangement(vllm_config, spec, tensors, next(iter(tensors.values())).device)
    pages_of = f"{pages.num_layers} of {_pages(tensors)}, {_names(tensors)}"
    layout = KVLayout(
        name=f"vllm-{layout_name(vllm_config).lower()}",
        version=1,
        block_tokens=ratio * spec.block_size,
        block_bytes=ratio * pages.block_bytes,
        dtype=_dtype(next(iter(tensors.values())).dtype),
        detail=f"{ratio}x({pages_of}),{arranged}",
    )
    parallel = vllm_config.parallel_config
    return BlockFacts(
        model_config=model_config(vllm_config),
        layout=layout,
        compute_dtype=_dtype(vllm_config.model_config.dtype),
        engine=f"vllm {'.'.join(map(str, release()))} {type(whole_spec).__name__}",
        codec=str(vllm_config.cache_config.cache_dtype),
        parallel_size=parallel.world_size,
        parallel_rank=parallel.rank,
        num_engine_blocks=ratio,
    )


def arrangement(vllm_config: Any, spec: Any, layers: Iterable[str], device: torch.device) -> str:
    """Return by what the pages of layers are arranged otherwise at an equal size.

    Known in a worker, once its model is loaded.
    """
    made = vllm_config.compilation_config.static_forward_context
    backends = sorted({made[name].attn_backend.get_name() for name in layers})
    packed = instruction_set(vllm_config, spec) if device.type == "cpu" else _generation(device)
    return f"{'+'.join(backends)},{packed}"


def _pages(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the shapes of all layers' pages, equal neighbours together."""
    each = [f"{_dtype(t.dtype)}[{'x'.join(map(str, t.shape[1:]))}]" for t in tensors.values()]
    return ",".join(f"{len(list(equal))}*{page}" for page, equal in groupby(each))


def _names(layers: Iterable[str]) -> str:
    """Return what stands for the names of layers: a stage of a pipeline may have any of them."""
    return hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16]


def _generation(device: torch.device) -> str:
    """Return what tells a GPU's formats of numbers: eight bits are not the same ones everywhere.

    On AMD's a variable of vLLM's has the numbers of a page in another order, under the same names.
    """
    if device.type != "cuda":  # which torch calls AMD's as well
        return device.type
    version = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if not torch.version.hip:
        return f"cuda {version}"
    is_shuffled = getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False)
    return f"rocm {version}{' shuffled' if is_shuffled else ''}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
