"""How long a simulated engine computes, and the model dimensions that determine it."""

import csv
import json
import lzma
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.core.layout import KVLayout, paged_layout
from kvtier.core.plan import StepSample
from kvtier.errors import StartError

__all__ = ["DTYPE_BYTES", "Dimensions", "PrefillModel", "fit_profile", "read_dimensions"]


_SMALL_TOKENS = 32
"""Batches up to this size take as long as reading the weights."""
_LARGE_TOKENS = 1024
"""Batches from this size on take a fixed time per token."""

_NUMBER_MAX = 1e12
"""Larger than any width or number of milliseconds."""


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """``max(floor, token * new) + attended * new * (past + new / 2)``.

    The defaults are an 8B model on an A100.
    """

    floor_s: float = 0.010
    token_s: float = 67e-6
    attended_s: float = 67e-6 / 30_000

    def seconds(self, num_new: int, num_past: int) -> float:
        """Return the time to compute ``num_new`` tokens after ``num_past`` others."""
        if num_new <= 0:
            return 0.0
        attended = num_new * (num_past + num_new / 2)
        return max(self.floor_s, self.token_s * num_new) + self.attended_s * attended

    def sample(self, num_new: int, num_past: int) -> StepSample:
        """Return the step sample that an engine would report."""
        attended = num_new * (num_past + num_new / 2)
        return StepSample(num_new, 0, attended, 0, self.seconds(num_new, num_past))


@dataclass(frozen=True, slots=True)
class _Row:
    num_tokens: int
    layer_s: float
    embedding_s: float


def fit_profile(path: Path, num_layers: int) -> PrefillModel:
    """Fit a model to an operator profile by Vidur: CSV, in ms, for one layer.

    The profile does not include attention. It is assumed to run at the speed of the layers' other
    operations, whose number follows from the model's dimensions in the profile. Raises StartError
    if there is no such file.
    """
    try:
        rows = _rows(path)
        dimensions = _profile_dimensions(path)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(str(path), f"cannot be read: {reason}", "give a profile") from error
    small = [row for row in rows if row.num_tokens <= _SMALL_TOKENS]
    large = [row for row in rows if row.num_tokens >= _LARGE_TOKENS]
    if not small or not large:
        problem = f"lacks batches of up to {_SMALL_TOKENS} or from {_LARGE_TOKENS} tokens"
        raise StartError(str(path), problem, "give a complete profile")

    def seconds(row: _Row) -> float:
        return num_layers * row.layer_s + row.embedding_s

    tokens = np.array([row.num_tokens for row in large], float)
    times = np.array([seconds(row) for row in large])
    token_s = float(tokens @ times / (tokens @ tokens))
    if not token_s:
        raise StartError(str(path), "has batches of zero time", "give a complete profile")
    hidden, kv_width, inner, num_matrices = dimensions
    per_token = 2 * (hidden * (2 * hidden + 2 * kv_width) + num_matrices * hidden * inner)
    per_attended = 4 * hidden
    return PrefillModel(
        floor_s=float(np.median([seconds(row) for row in small])),
        token_s=token_s,
        attended_s=token_s * per_attended / per_token,
    )


def _table(path: Path) -> Sequence[dict[str, str]]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        rows = [*csv.DictReader(file)]
    if not rows:
        raise StartError(str(path), "has no rows", "give a profile")
    return rows


def _rows(path: Path) -> list[_Row]:
    """Return the rows of a single device."""
    found: list[_Row] = []
    for number, row in enumerate(_table(path), start=2):
        if row.get("num_tensor_parallel_workers", "1") != "1":
            continue
        times = {
            name.split(".")[1]: _number(path, number, name, text) / 1000
            for name, text in row.items()
            if name.startswith("time_stats.") and name.endswith(".median") and text
        }
        embedding_s = times.pop("emb", 0.0)
        num_tokens = int(_number(path, number, "num_tokens", row.get("num_tokens", "")))
        found.append(_Row(num_tokens, sum(times.values()), embedding_s))
    return found


def _profile_dimensions(path: Path) -> tuple[int, int, int, int]:
    """Return a model's width, key width, feed-forward width, and number of matrices."""
    row = _table(path)[0]

    def number(name: str) -> int:
        return int(_number(path, 2, name, row.get(name, "")))

    hidden = number("n_embd")
    kv_width = hidden * number("n_kv_head") // max(1, number("n_head"))
    num_matrices = 3 if row.get("use_gated_mlp", "True") == "True" else 2
    return hidden, kv_width, number("n_expanded_embd"), num_matrices


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _NUMBER_MAX:
        problem = f"{text[:40]!r} is not a valid number"
        raise StartError(f"{path}:{line}: {name}", problem, "fix the profile")
    return value


DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
"""Bytes per number of K or V."""

_REFERENCE_FLOPS = 2.0 * 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
"""Operations per token in the layers of the 8B model that ``PrefillModel`` describes."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Dimensions of a model's KV cache, and its operations per token if known."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    flops_per_token: float = 0.0
    """Operations per token in the layers; 0: unknown."""

    def layout(self, block_tokens: int) -> KVLayout:
        """Return the block layout of the integrated engine."""
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
        """Return the KV bytes per token."""
        return self.layout(1).block_bytes

    def prefill(self, model: PrefillModel) -> PrefillModel:
        """Scale a device's speed, known for the 8B model, to this model's operations."""
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
    """Read a folder with config.json or a GGUF file; ``dtype`` overrides that of the KV cache.

    Raises StartError if dimensions are missing.
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
            "uses latent attention (MLA), without K and V per head",
            "give --model-layers, --kv-heads and --head-dim that give the same bytes",
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
        raise StartError(
            f"model: {name}", f"{value!r} is not a count", "give the numbers as options"
        )
    return value


def _folder_fields(path: Path) -> Mapping[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        raise StartError("model", problem, "give a folder with config.json") from error
    except (ValueError, RecursionError) as error:
        raise StartError("model", f"{path} is not valid JSON: {error}", "fetch it again") from error
    if not isinstance(fields, dict):
        raise StartError("model", f"{path} is not a JSON object", "fetch it again")
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
        raise StartError(
            "model", f"{path} is not a GGUF file: {error}", "fetch it again"
        ) from error
    names = {
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
    }
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}
