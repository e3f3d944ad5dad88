"""Decides from a model's files alone whether the engine computes it correctly.

Imports no torch, so that a daemon can refuse a model before it allocates anything.

Rules
-----
* Only listed architectures are supported, each verified against its own ``generate``
  (tests/engine). A model with another kind of attention, or with K and V that depend on more than
  the preceding tokens, is refused by name.
* A configuration is checked twice: as stored in the folder, and as transformers reads it, with all
  defaults filled in.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import StartError

__all__ = [
    "ARCHITECTURES",
    "GGUF_TYPES",
    "ROPE_TYPES",
    "check_fields",
    "check_model",
    "refuse",
]

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Verified model types, with the class of each in transformers."""

ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings that depend on the position alone. ``dynamic`` and ``longrope`` change with the
longest sequence of a batch, so a block would depend on what was computed beside it."""

GGUF_TYPES = frozenset({"llama"})
"""Model types also verified from GGUF files: each has its own RoPE order."""

_GGUF_HEADER_MAX_BYTES = 64 << 20
"""Far more than any vocabulary needs; names and tensors are listed before its end."""

_GGUF_SCALED_ROPE = (b".rope.scaling.", b"rope_freqs.weight")
"""Names of what transformers silently drops when it reads a GGUF file."""

_GGUF_TYPE_KEY = b"general.architecture"
_GGUF_STRING = struct.Struct("<IQ")  # the value's type, 8 for a string, and its length


def refuse(problem: str, remedy: str) -> StartError:
    """Return the error that refuses a model."""
    return StartError("engine.model", problem, remedy)


def check_model(path: Path, context_limit: int = 0) -> None:
    """Raise StartError if a model's files show that it is unsupported."""
    if not path.exists():
        raise refuse(f"{path} does not exist", "give a model folder or a GGUF file")
    try:
        if path.is_file():
            _check_gguf(path)
        else:
            check_fields(_folder_fields(path), context_limit)
    except OSError as error:
        raise refuse(
            f"cannot read {path}: {error.strerror}", "make it readable for this user"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        problem = f"config.json has a value of the wrong type: {error}"
        raise refuse(problem, "download it again") from error


def check_fields(fields: Mapping[str, Any], context_limit: int) -> int:
    """Refuse a configuration that the engine does not compute correctly.

    Returns the context limit to use: ``context_limit``, or for 0 the model's own (0 if the
    configuration leaves it to defaults).
    """
    _check_type(fields)
    longest = int(fields.get("max_position_embeddings") or 0)
    if context_limit < 0 or (longest and context_limit > longest):
        problem = f"{context_limit} exceeds the model's limit of {longest} tokens"
        raise StartError(
            "engine.context_limit", problem, "lower it, or set 0 for the model's own limit"
        )
    limit = context_limit or longest
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    if window and window < limit:
        raise refuse(
            f"the model has a sliding attention window of {window} tokens",
            f"set engine.context_limit to at most {window}",
        )
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        supported = ", ".join(sorted(ROPE_TYPES))
        raise refuse(f"RoPE type {rope_type!r} is not supported", f"use a model with {supported}")
    return limit


def _folder_fields(path: Path) -> dict[str, Any]:
    """Return the configuration of a folder that has all files of a model."""
    if not (path / "config.json").is_file():
        raise refuse(f"{path} has no config.json", "give a Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        raise refuse(f"{path} has no *.safetensors", "download the weights or convert them")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise refuse(f"{path} has no tokenizer.json", "download the tokenizer's files")
    try:
        fields = json.loads((path / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise refuse(f"config.json is not valid: {error}", "download it again") from error
    if not isinstance(fields, dict):
        raise refuse("config.json is not valid: not an object", "download it again")
    return fields


def _check_type(fields: Mapping[str, Any]) -> None:
    model_type = str(fields.get("model_type"))
    supported = f"use a model of type {', '.join(sorted(ARCHITECTURES))}"
    if fields.get("is_encoder_decoder"):
        raise refuse(f"{model_type!r} is an encoder-decoder model", supported)
    if fields.get("kv_lora_rank"):
        raise refuse(f"{model_type!r} has latent attention (MLA)", supported)
    other_layers = set(fields.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise refuse(f"{model_type!r} has layers of type {sorted(other_layers)}", supported)
    if model_type not in ARCHITECTURES:
        raise refuse(f"models of type {model_type!r} are not supported", supported)
    named = fields.get("architectures")
    if named and ARCHITECTURES[model_type] not in named:
        raise refuse(f"{named} does not generate text", f"use a {ARCHITECTURES[model_type]}")
    if fields.get("quantization_config"):
        raise refuse("the weights are quantized", "use float weights or a GGUF file")


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(_GGUF_HEADER_MAX_BYTES)
    if not header.startswith(b"GGUF"):
        raise refuse(f"{path} is not a GGUF file", "give a model folder or a GGUF file")
    model_type = _gguf_type(header)
    if model_type not in GGUF_TYPES:
        raise refuse(
            f"GGUF files of type {model_type!r} are not supported", "give the model's folder"
        )
    if any(name in header for name in _GGUF_SCALED_ROPE):
        raise refuse("the model has scaled RoPE, which GGUF files lose", "give the model's folder")


def _gguf_type(header: bytes) -> str:
    """Return the model type named in a GGUF header, or an empty string."""
    start = header.find(_GGUF_TYPE_KEY) + len(_GGUF_TYPE_KEY)
    end = start + _GGUF_STRING.size
    if start < len(_GGUF_TYPE_KEY) or end > len(header):
        return ""
    _, length = _GGUF_STRING.unpack(header[start:end])
    return header[end : end + length].decode(errors="replace")
