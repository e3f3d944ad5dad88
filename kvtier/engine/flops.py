"""Estimates a model's operations and measures its device: a first guess for the cost model.

It is used until the first steps are measured, so a factor of two does not matter here; its order of
magnitude does.
"""

import time

import torch

from kvtier.core.plan import ModelFlops
from kvtier.engine.model import LoadedModel

__all__ = ["model_flops"]

_ROWS = 256
"""Tokens of a chunk, as far as the speed of a multiplication depends on it."""

_WIDTH_MAX = 4096
"""Maximum width of the matrices: larger ones are not faster."""

_MEASURE_S = 0.03
"""Long enough for a processor to reach full speed, short beside loading any model."""

_REPEATS_MAX = 64


def model_flops(loaded: LoadedModel) -> ModelFlops:
    """Count the operations of the layers, and measure the device's speed for tens of ms."""
    weights = sum(
        parameter.numel()
        for name, parameter in loaded.model.named_parameters()
        if ".layers." in name and parameter.dim() > 1
    )
    config = loaded.config
    num_heads = int(getattr(config, "num_attention_heads", 1))
    return ModelFlops(
        per_token=2.0 * weights,
        # One multiply-add per dimension for the score, and one for the weighted sum.
        per_attended=4.0 * loaded.num_layers * num_heads * loaded.head_dim,
        per_s=_measure(int(config.hidden_size), loaded.dtype, loaded.model.device),
    )


@torch.inference_mode()
def _measure(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the fastest of some multiplications; 0 on failure."""
    width = min(width, _WIDTH_MAX)
    try:
        left = torch.ones((_ROWS, width), dtype=dtype, device=device)
        right = torch.ones((width, 4 * width), dtype=dtype, device=device)
        best_s = min(_times(left, right), default=0.0)
    except RuntimeError:  # out of memory, or a dtype without multiplication
        return 0.0
    return 2.0 * _ROWS * width * 4 * width / best_s if best_s else 0.0


def _times(left: torch.Tensor, right: torch.Tensor) -> list[float]:
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < _REPEATS_MAX and time.perf_counter() - began_s < _MEASURE_S:
        start_s = time.perf_counter()
        product = left @ right
        if product.device.type == "cuda":
            torch.cuda.synchronize(product.device)
        times.append(time.perf_counter() - start_s)
    return times[1:] or times
