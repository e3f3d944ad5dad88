"""Recognizes models and settings of vLLM that are not supported; their blocks are not cached.

A setting is refused if its KV depends on more than a block's identity covers, or if its blocks are
not the KV of a fixed number of tokens. Settings that were never examined are refused as well: the
lists here contain what is supported.
"""

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["layer_specs", "refusal"]

_LOAD_FORMATS = frozenset(
    {
        "auto",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "pt",
        "safetensors",
        "sharded_state",
    }
)
"""Formats that read the files in the model's directory. ``dummy`` and remote streams do not, and
``npcache`` reads copies of them that it made at an unknown time."""

_OTHER_MODELS = ("text_model_id", "audio_model_id")
"""Configuration fields that name hub models from which parts are loaded."""

_SPECULATIVE_METHODS = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
"""Methods without KV of their own; the KV of others depends on tokens after a block."""

_CACHE_DTYPES = frozenset(
    {"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "fp8_inc"}
)
"""Types whose scales, if any, are stored with the weights."""

_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Supported kinds of layer groups; others keep a window, a state, or another sequence's KV."""

_MULTIPLE_SPEC = "UniformTypeKVCacheSpecs"


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return in one line why vLLM's blocks cannot be cached; empty if they can."""
    groups = kv_cache_config.kv_cache_groups
    reasons = [
        *_of_role(vllm_config),
        *_of_cached_context(vllm_config),
        *_of_weights(vllm_config),
        *_of_kv(vllm_config),
        *_of_groups(groups),
    ]
    return f"{vllm_config.model_config.model}: {'; '.join(reasons)}" if reasons else ""


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers: vLLM has one for all, or one for each."""
    if type(spec).__name__ == _MULTIPLE_SPEC:
        return list(spec.kv_cache_specs.values())
    return [spec]


def _of_role(config: Any) -> Iterator[str]:
    role = config.kv_transfer_config.kv_role
    if role != "kv_both":
        yield (
            f"kv_role {role} splits prefill from decode, which kvtier does not support: use kv_both"
            " (set kv_connector_extra_config.only to only store or only load)"
        )


def _of_cached_context(config: Any) -> Iterator[str]:
    """Yield why vLLM must not compute from cached context, whatever its source.

    vLLM switches its own prefix caching off if its kernels or the model do not support it. It does
    not record whether it or the user switched it off.
    """
    if not config.cache_config.enable_prefix_caching:
        yield (
            "vLLM's own prefix caching is off: by --no-enable-prefix-caching, or because vLLM"
            " cannot compute this model correctly from cached context here (see its log)"
        )
    elif not getattr(config.model_config, "is_prefix_caching_supported", True):
        yield "vLLM does not support prefix caching with this model, although it is switched on"


def _of_weights(config: Any) -> Iterator[str]:
    model = config.model_config
    load_format = str(config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        yield f"weights of load format {load_format} are not identified by files"
    if "pattern" in (getattr(config.load_config, "model_loader_extra_config", None) or {}):
        yield "weight files follow a custom pattern (model_loader_extra_config)"
    for name in _OTHER_MODELS:
        if other := getattr(getattr(model, "hf_config", None), name, None):
            yield f"weights come from {other} as well ({name})"
    if weights := getattr(model, "model_weights", ""):
        yield f"weights come from {weights}"
    if getattr(config, "weight_transfer_config", None) is not None:
        yield "weights are replaced while vLLM runs (weight_transfer_config)"
    if extension := getattr(config.parallel_config, "worker_extension_cls", ""):
        yield f"{extension} may replace weights (worker_extension_cls)"
    if getattr(model, "enable_sleep_mode", False):
        yield "sleep mode discards weights and KV (enable_sleep_mode)"


def _of_kv(config: Any) -> Iterator[str]:
    model, parallel = config.model_config, config.parallel_config
    cache_dtype = str(config.cache_config.cache_dtype)
    if cache_dtype not in _CACHE_DTYPES:
        yield f"KV dtype {cache_dtype} is not supported"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        yield "KV scales are computed from the first request (calculate_kv_scales)"
    speculative = config.speculative_config
    if speculative is not None and str(speculative.method) not in _SPECULATIVE_METHODS:
        yield f"speculative decoding by {speculative.method} has its own KV"
    if getattr(config, "diffusion_config", None) is not None:
        yield "diffusion rewrites KV (diffusion_config)"
    if getattr(config, "engram_config", None) is not None:
        yield "KV depends on tables stored elsewhere (engram_config)"
    if getattr(model, "is_encoder_decoder", False):
        yield "the decoder's KV depends on an encoder's output"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            yield f"{size} ranks share the tokens of a block ({name})"
    if getattr(parallel, "nnodes", 1) > 1 or str(parallel.distributed_executor_backend) == "ray":
        yield "workers may be on other machines (nnodes, distributed_executor_backend)"


def _of_groups(groups: Sequence[Any]) -> Iterator[str]:
    names = [_spec_names(group.kv_cache_spec) for group in groups]
    if len(groups) != 1:
        kinds = ", ".join(map("+".join, names))
        yield f"{len(groups)} groups of KV ({kinds}), only one is supported"
        return
    if strange := sorted(set(names[0]) - _SPECS):
        yield f"layers with {', '.join(strange)}"
        return
    for spec in layer_specs(groups[0].kv_cache_spec):
        if getattr(spec, "non_causal", False):
            yield "layers attend to later tokens (non_causal)"
            return
        if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "compress_ratio", 1) != 1:
            yield "layers keep one state for several tokens"
            return


def _spec_names(spec: Any) -> list[str]:
    return sorted({type(each).__name__ for each in layer_specs(spec)})
