"""Differences between releases of vLLM, and which releases are supported. Imports vLLM."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import vllm

from kvtier import __version__
from kvtier.connectors.kit.weights import began_ns, hub_snapshot
from kvtier.connectors.vllm_common.idle import UnservedRelease

__all__ = ["arrangement", "check_release", "layout_name", "local_model", "release"]

_OLDEST = (0, 28)
_NEWEST = (0, 32)
"""Tested with 0.28, 0.30 and 0.32. Other releases may have other hooks, and are refused."""

_OLD_NAMES: Mapping[str, str] = {"HND": "LBHNC", "NHD": "LBNHC"}
"""Names that 0.28 uses for its two layouts."""


def release() -> tuple[int, int]:
    """Return vLLM's major and minor version."""
    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def check_release() -> None:
    """Raise UnservedRelease, with the remedy, for an unsupported release of vLLM."""
    if not _OLDEST <= release() <= _NEWEST:
        served = " to ".join(".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise UnservedRelease(
            f"kvtier {__version__} serves vLLM {served}, and this is {vllm.__version__}: install a"
            " newer kvtier (pip install --upgrade kvtier) or a supported vLLM"
        )


def local_model(vllm_config: Any) -> Path:
    """Return the directory of a model's files. Raises OSError or ValueError if it is unknown.

    A hub name leads to the hub's cache, into which vLLM has downloaded it before.
    """
    model = vllm_config.model_config
    path = Path(model.model)
    if path.exists():
        return path
    cache = vllm_config.load_config.download_dir
    return hub_snapshot(model.model, model.revision, cache, began_ns())


def layout_name(vllm_config: Any) -> str:
    """Return vLLM's name for the order of dimensions in its KV tensors."""
    if release() < (0, 30):
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        return _OLD_NAMES[get_kv_cache_layout()]
    name: str = vllm_config.cache_config.get_resolved_kv_cache_layout().name
    return name


def arrangement(vllm_config: Any, spec: Any, layers: Iterable[str], device: torch.device) -> str:
    """Return what else, besides the size, determines the format of the layers' pages.

    Known in a worker, once its model is loaded.
    """
    made = vllm_config.compilation_config.static_forward_context
    backends = sorted({made[name].attn_backend.get_name() for name in layers})
    packed = _instruction_set(vllm_config, spec) if device.type == "cpu" else _generation(device)
    return f"{'+'.join(backends)},{packed}"


def _instruction_set(vllm_config: Any, spec: Any) -> str:
    """Return the instruction sets with which vLLM packs pages and computes on a CPU.

    vLLM decides this by the same function when it creates its attention, and does not report it.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    packed = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return f"{packed}/{torch.backends.cpu.get_cpu_capability().lower()}"


def _generation(device: torch.device) -> str:
    """Return what determines a GPU's number formats: 8-bit formats differ between generations.

    On AMD GPUs a vLLM environment variable changes the order within a page, under the same names.
    """
    if device.type != "cuda":  # torch calls AMD GPUs cuda as well
        return device.type
    version = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if not torch.version.hip:
        return f"cuda {version}"
    from vllm import envs

    is_shuffled = getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False)
    return f"rocm {version}{' shuffled' if is_shuffled else ''}"
