"""What a plan must know of a model: its layers and heads, from its files or as they are given."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtier.core.layout import KVLayout, paged_layout
from kvtier.errors import StartError
from kvtier.sim.replay.prefill import PrefillModel

__all__ = ["DTYPE_BYTES", "Dimensions", "read_dimensions"]

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes of one number of K or V."""

_REFERENCE_FLOPS = 2.0 * 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
"""Of one token in the layers of the 8B model that ``PrefillModel`` describes."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """A model's KV, and what a token takes to compute where that is known."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    flops_per_token: float = 0.0
    """In the layers; 0: not known."""

    def layout(self, block_tokens: int) -> KVLayout:
        """Return how the integrated engine lays out a block."""
        return paged_layout(
            block_tokens=block_tokens,
            engine_block_tokens=block_tokens,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            dtype_bytes=DTYPE_BYTES[self.dtype],
        )

    @property
    def token_bytes(self) -> int:
        """Return the KV of one token."""
        return self.layout(1).block_bytes

    def prefill(self, model: PrefillModel) -> PrefillModel:
        """Return a device's speed, known for the 8B model, scaled to this model's operations."""
        if not self.flops_per_token:
            return model
        share = self.flops_per_token / _REFERENCE_FLOPS
        return replace(
            model,
            floor_s=model.floor_s * share,
            token_s=model.token_s * share,
            attended_s=model.attended_s * share,
        )


def read_dimensions(path: Path, dtype: str = "") -> Dimensions:
    """Read a folder with config.json, or a GGUF file; ``dtype`` is of the KV, if it is another.

    Raises StartError for what tells too little.
    """
    if path.is_dir():
        fields, name = _folder_fields(path / "config.json"), path.name
    elif path.is_file():
        fields, name = _gguf_fields(path), path.stem
    else:
        raise StartError("model", f"{path} does not exist", "give a model folder or a GGUF file")
    return _dimensions(name, fields, dtype)


def _dimensions(name: str, fields: Mapping[str, Any], dtype: str) -> Dimensions:
    if fields.get("kv_lora_rank"):
        raise StartError(
            "model",
            "has latent attention (MLA), which has no K and V by head",
            "give --model-layers, --kv-heads and --head-dim that come to its bytes",
        )
    heads = _count(fields, "num_attention_heads")
    hidden = _count(fields, "hidden_size")
    layers = _count(fields, "num_hidden_layers")
    kv_heads = _count(fields, "num_key_value_heads", heads)
    head_dim = _count(fields, "head_dim", hidden // heads)
    inner = _count(fields, "intermediate_size", 4 * hidden)
    matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    own = str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16")
    chosen = dtype or (own if own in DTYPE_BYTES else "bfloat16")
    return Dimensions(name, layers, kv_heads, head_dim, chosen, 2.0 * layers * matrices)


def _count(fields: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 24:
        raise StartError(f"model: {name}", f"{value!r} is no count", "give the numbers as options")
    return value


def _folder_fields(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        raise StartError("model", problem, "give a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise StartError("model", f"{path} is no JSON: {error}", "fetch it again") from error
    if not isinstance(fields, dict):
        raise StartError("model", f"{path} is no object", "fetch it again")
    nested = fields.get("text_config")
    return nested if isinstance(nested, dict) and "num_hidden_layers" not in fields else fields


def _gguf_fields(path: Path) -> Mapping[str, Any]:
    try:
        from gguf import GGUFReader
    except ImportError:
        remedy = "pip install 'kvtier[engine]'"
        raise StartError("model", "GGUF files need the gguf package", remedy) from None
    try:
        reader = GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        values = {
            name.removeprefix(f"{architecture}."): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(f"{architecture}.")
        }
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise StartError("model", f"{path} is no GGUF file: {error}", "fetch it again") from error
    names = {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
    }
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
