"""An engine's KV tensors as bytes: which bytes belong to a block, by stride, and in which order.

A page is what one layer stores for one engine block. A kvtier block is a whole number of engine
blocks, in token order. Each of these consists of its layers' pages, in the order in which the
engine names the layers. Within a page, dimensions come in memory order, widest stride first: one
run of bytes in most layouts, several if heads or layers lie outside the blocks. The format inside a
page is the engine's; its name is part of the block's identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Pages", "Plane"]

_WORDS: Mapping[int, torch.dtype] = {
    8: torch.int64,
    4: torch.int32,
    2: torch.int16,
    1: torch.uint8,
}
"""A device moves words faster than bytes, and a copy does not interpret them."""

_HOST_WORDS: Mapping[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.uint8: np.uint8,
}


@dataclass(frozen=True, slots=True)
class Plane:
    """Layers at even distances in one allocation; often all layers."""

    words: torch.Tensor
    """A view of the engine's memory; shape (block, layer, piece of a page ..., word)."""
    start: int
    """The plane's words are ``[start:end]`` of the words of a block."""
    end: int

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return this plane's part of ``blocks``, which are rows of words, in the plane's shape."""
        return blocks[:, self.start : self.end].view(len(blocks), *self.words.shape[1:])


@dataclass(frozen=True, slots=True)
class _Layer:
    """A tensor with the block dimension first, then the page's dimensions in memory order."""

    name: str
    tensor: torch.Tensor

    def is_like(self, other: "_Layer") -> bool:
        """Return whether two are views of one allocation that differ only in their offset."""
        mine, others = self.tensor, other.tensor
        return (
            mine.shape == others.shape
            and mine.stride() == others.stride()
            and mine.dtype == others.dtype
            and mine.untyped_storage().data_ptr() == others.untyped_storage().data_ptr()
        )


class Pages:
    """The pages of all layers, which are on one device."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """``tensors`` have ``num_blocks`` engine blocks; raises ValueError, naming the layer."""
        layers = [_layer(name, tensor, num_blocks) for name, tensor in _distinct(tensors)]
        if not layers:
            raise ValueError("the engine has registered no KV cache")
        devices = {layer.tensor.device for layer in layers}
        if len(devices) > 1:
            raise ValueError(
                f"the engine's layers are on several devices: {sorted(map(str, devices))}"
            )
        self.device = devices.pop()
        self.num_layers = len(layers)
        self.num_blocks = num_blocks
        self.planes = _planes(layers)
        self.word = self.planes[0].words.dtype
        self.host_word = _HOST_WORDS[self.word]
        self.block_words = self.planes[-1].end
        self.block_bytes = self.block_words * self.word.itemsize
        """Bytes of one engine block, all layers."""

    def check(self, blocks: Sequence[int]) -> None:
        """Raise IndexError for a block out of range: on a device it would be fatal."""
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise IndexError(f"the engine has {self.num_blocks} blocks, and no block {block}")

    def rows(self, slot: memoryview, num_blocks: int) -> npt.NDArray[np.generic]:
        """Return a slot as rows of words, one for each engine block."""
        assert len(slot) == num_blocks * self.block_bytes, "a slot is as long as its blocks"
        return np.frombuffer(slot, self.host_word).reshape(num_blocks, self.block_words)


def _distinct(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Leave out layers that share the KV of another one."""
    seen: set[int] = set()
    distinct: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            distinct.append((name, tensor))
    return distinct


def _layer(name: str, tensor: torch.Tensor, num_blocks: int) -> _Layer:
    """Return a layer with contiguous dimensions merged and dimensions of length 1 removed."""
    if tensor.dim() < 2 or not len(tensor) or len(tensor) % num_blocks:
        raise ValueError(f"layer {name} has no {num_blocks} blocks: its shape is {_shape(tensor)}")
    # Attention may use smaller blocks, several of which make up one of the scheduler's.
    ratio = len(tensor) // num_blocks
    block_stride = ratio * tensor.stride(0)
    page = [(tensor.stride(0), ratio), *zip(tensor.stride()[1:], tensor.shape[1:], strict=True)]
    dimensions = sorted((stride, length) for stride, length in page if length > 1)
    _check_apart(name, [*dimensions, (block_stride, num_blocks)])
    runs = [(1, 1)]
    for stride, length in dimensions:
        inner_stride, inner_length = runs[0]
        if stride == inner_stride * inner_length:
            runs[0] = (inner_stride, inner_length * length)
        else:
            runs.insert(0, (stride, length))
    strides, lengths = zip(*runs, strict=True)
    return _Layer(
        name, tensor.detach().as_strided((num_blocks, *lengths), (block_stride, *strides))
    )


def _check_apart(name: str, dimensions: list[tuple[int, int]]) -> None:
    """Raise ValueError for a tensor in which two elements share memory."""
    extent = 1
    for stride, length in sorted(dimensions):
        if length > 1 and stride < extent:
            raise ValueError(f"layer {name} overlaps itself: strides and lengths {dimensions}")
        extent = max(extent, (length - 1) * stride + extent)


def _planes(layers: list[_Layer]) -> tuple[Plane, ...]:
    """Return the layers in their order; one plane if they lie at even distances."""
    step = _step(layers)
    views: list[torch.Tensor] = []
    for group in [layers] if step else [[layer] for layer in layers]:
        first = group[0].tensor
        size = (len(first), len(group), *first.shape[1:])
        strides = (first.stride(0), step or first.stride(0), *first.stride()[1:])
        views.append(first.as_strided(size, strides).view(torch.uint8))
    word = _word(views)
    planes: list[Plane] = []
    start = 0
    for view in views:
        words = view.view(word)
        planes.append(Plane(words, start, start + words[0].numel()))
        start = planes[-1].end
    return tuple(planes)


def _step(layers: list[_Layer]) -> int:
    """Return the distance between consecutive layers, in elements; 0 if it varies."""
    first = layers[0]
    places = [layer.tensor.storage_offset() for layer in layers]
    steps = {int(after - before) for before, after in pairwise(places)}
    is_even = len(steps) == 1 and all(layer.is_like(first) for layer in layers)
    return max(0, steps.pop()) if is_even else 0


def _word(views: list[torch.Tensor]) -> torch.dtype:
    """Return the widest word that divides all lengths and alignments of the runs of bytes."""
    lengths = [
        each
        for view in views
        for each in (view.data_ptr(), view.storage_offset(), view.shape[-1], *view.stride()[:-1])
    ]
    return _WORDS[gcd(8, *lengths)]


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape))
