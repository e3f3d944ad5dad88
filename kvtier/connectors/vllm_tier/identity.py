"""The key space of vLLM's chunks.

A chunk is a row of vLLM's CPU tier: the pages of all layers and all workers, side by side. Their
order follows from the configuration that vLLM gives its tiers. The model and the format of a page,
which a worker knows, come from the connector. If anything is unknown, chunks are not cached.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kvtier.connectors.vllm_common.model_config import model_config
from kvtier.connectors.vllm_common.refusal import refusal
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout

__all__ = ["ModelFacts", "chunk_layout", "model_facts", "side_by_side"]

_STABLE_HASHES = frozenset({"sha256", "sha256_cbor"})
"""vLLM's collision-resistant algorithms for block names."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the model that vLLM's connector knows and its tiers do not."""

    name: str
    find_files: Callable[[], Path]
    """Returns the directory of the weights; may raise OSError or ValueError."""
    config: str
    compute_dtype: str
    codec: str
    engine: str
    pages: Future[str]
    """The format of the workers' pages once reported, or a ValueError with the reason."""

    def space(self, weights: bytes, layout: KVLayout, pages: str) -> KeySpace:
        """Return the key space of chunks computed with these weights."""
        return KeySpace(
            weights=weights,
            model_config=self.config,
            layout=replace(layout, detail=f"{layout.detail},pages={pages.lower()}"),
            compute_dtype=self.compute_dtype,
            engine=self.engine,
            codec=self.codec,
        )


def model_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    release: tuple[int, int],
    find_files: Callable[[], Path],
    pages: Future[str],
) -> ModelFacts:
    """Return the facts about a configuration's model.

    Raises ValueError with the reasons if its chunks cannot be cached.
    """
    model = vllm_config.model_config
    reasons = [refusal(vllm_config, kv_cache_config), *_own_refusals(vllm_config, release)]
    if any(reasons):
        raise ValueError("; ".join(filter(None, reasons)))
    return ModelFacts(
        name=Path(model.model).name,
        find_files=find_files,
        config=model_config(vllm_config),
        compute_dtype=str(model.dtype).removeprefix("torch."),
        codec=str(vllm_config.cache_config.cache_dtype),
        engine=f"vllm {'.'.join(map(str, release))} chunk",
        pages=pages,
    )


def side_by_side(arranged: Sequence[str]) -> str:
    """Return the page format of all workers, given each one's in order."""
    return " ".join(f"{len(list(equal))}x({each})" for each, equal in groupby(arranged))


def chunk_layout(config: Any, chunk_bytes: int) -> KVLayout:
    """Return the layout of a chunk, from vLLM's ``OffloadingConfig``.

    Raises ValueError if it is unknown.
    """
    if len(config.groups) != 1:
        raise ValueError(f"{len(config.groups)} groups of KV, only one is supported")
    group, parallel = config.groups[0], config.parallel
    layers = "\n".join(group.layer_names).encode()
    fields = {
        "layers": f"{len(group.layer_names)}:{hashlib.sha256(layers).hexdigest()[:16]}",
        "token": group.tokens_per_block,
        "block": config.cache.blocks_per_chunk,
        "hash": config.cache.tokens_per_hash,
        "worker_bytes": config.worker_kv_bytes_per_block,
        "worker": parallel.world_size,
        "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "replicated": config.replicated_layout,
        "canonical": config.canonical_layout,
        "order": _order(config),
    }
    return KVLayout(
        name="vllm-chunk",
        version=1,
        block_tokens=group.tokens_per_block * config.cache.blocks_per_chunk,
        block_bytes=chunk_bytes,
        dtype=config.model.dtype,
        detail=",".join(f"{name}={value}" for name, value in fields.items()).lower(),
    )


def _own_refusals(vllm_config: Any, release: tuple[int, int]) -> Iterator[str]:
    """Yield what else a tier does not support, since it sees only names."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in _STABLE_HASHES:
        yield f"vLLM names blocks by {algorithm}: use --prefix-caching-hash-algo sha256"
    if release < (0, 30) and not os.environ.get("PYTHONHASHSEED"):
        yield "this vLLM names blocks differently in each process: set PYTHONHASHSEED=0"
    if vllm_config.lora_config is not None:
        yield "vLLM names the blocks of a LoRA adapter by its name, not by its content"
    if vllm_config.model_config.is_multimodal_model:
        yield "vLLM names the blocks of media by names that a client may choose"


def _order(config: Any) -> str:
    """Return vLLM's name for the order of dimensions in its KV tensors.

    The scheduler process of 0.28 does not know its workers' choice unless it is set.
    """
    name = getattr(config, "kv_cache_layout", None) or os.environ.get("VLLM_KV_CACHE_LAYOUT")
    if not name:
        raise ValueError("the layout of vLLM's KV is not known: set VLLM_KV_CACHE_LAYOUT")
    return str(name)
