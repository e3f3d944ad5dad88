"""The part of a block's identity that comes from vLLM's configuration of the model."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

__all__ = ["model_config"]

_IGNORED_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "_commit_hash",
        "_name_or_path",
        "transformers_version",
        "use_cache",
    }
)
"""Names, paths and loading settings; everything else in a configuration counts."""

_MODEL_SETTINGS = (
    "quantization",
    "quantization_config",
    "model_impl",
    "model_class_overrides",
    "disable_sliding_window",
    "config_format",
)
_CACHE_SETTINGS = ("kv_cache_dtype_skip_layers", "kv_sharing_fast_prefill", "sliding_window")
_MEDIA_SETTINGS = (
    "language_model_only",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "interleave_mm_strings",
    "video_pruning_rate",
    "video_pruning_method",
)
_ADAPTER_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_moe_shared_loras",
    "enable_mixed_moe_lora_format",
)
_PARALLEL_SETTINGS = ("tensor_parallel_size", "pipeline_parallel_size")
"""vLLM's names of settings that count; in a release that lacks one its value is null."""

_LENGTH_SCALED = "longrope"
"""The one position encoding that depends on ``max_model_len`` in vLLM."""

_GENERATION_SCALED = '"model_type": "llama4'
"""vLLM scales its attention by generation settings and ``max_model_len``."""


def model_config(vllm_config: Any) -> str:
    """Return a model's whole configuration and vLLM's settings for it, as canonical JSON."""
    model = vllm_config.model_config
    fields = _without_names(json.loads(model.hf_config.to_json_string(use_diff=False)))
    settings = {
        **_chosen(model, _MODEL_SETTINGS),
        **_chosen(vllm_config.cache_config, _CACHE_SETTINGS),
        **_chosen(vllm_config.parallel_config, _PARALLEL_SETTINGS),
        "additional_config": _plain(vllm_config.additional_config),
        "load_format": str(vllm_config.load_config.load_format),  # determines which files are read
    }
    if (media := getattr(model, "multimodal_config", None)) is not None:
        settings["media"] = _chosen(media, _MEDIA_SETTINGS)
        settings["transformers"] = version("transformers")  # it preprocesses images
    if (lora := vllm_config.lora_config) is not None:
        settings["lora"] = _chosen(lora, _ADAPTER_SETTINGS)
    text = json.dumps(fields)
    if _LENGTH_SCALED in text or _GENERATION_SCALED in text:
        settings["max_model_len"] = model.max_model_len
    if _GENERATION_SCALED in text:
        generation = model.try_get_generation_config() | model.override_generation_config
        settings["generation"] = _without_names(_plain(generation))
    both = {"model": fields, "vllm": settings}
    return json.dumps(both, sort_keys=True, separators=(",", ":"))


def _without_names(value: Any) -> Any:
    """Remove fields that do not count, from a configuration and those nested in it."""
    if isinstance(value, dict):
        return {
            name: _without_names(part)
            for name, part in value.items()
            if name not in _IGNORED_CONFIG
        }
    return [_without_names(part) for part in value] if isinstance(value, list) else value


def _chosen(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plain(getattr(config, name, None)) for name in names}


def _plain(value: Any) -> Any:
    """Return a setting as a JSON value. Raises ValueError if its text differs in each process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    text = repr(value)
    if " at 0x" in text:
        raise ValueError(f"a setting has no stable text: {text}")
    return text
