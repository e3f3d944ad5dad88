"""vLLM's KV tensors as bytes: for each layer and block one run of them, found by stride.

A page is what one layer keeps of one of vLLM's blocks. One of our blocks is a whole number of
vLLM's, in token order, and each of these is its layers' pages, in the order in which vLLM names the
layers. What is inside of a page is vLLM's business; its name for that is part of the identity.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Pages"]


class Pages:
    """The pages of all layers. Copies release the GIL; they may come from several threads."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's tensors; raises ValueError where a layer's page is not one run of bytes."""
        self._layers = [_rows(name, tensor) for name, tensor in _distinct(tensors)]
        if not self._layers:
            raise ValueError("vLLM has registered no KV cache")
        self.num_layers = len(self._layers)
        self.num_blocks = min(len(rows) for rows in self._layers)
        self.block_bytes = sum(rows.shape[1] for rows in self._layers)
        """Of one of vLLM's blocks, all layers."""

    def gather(self, blocks: Sequence[int], slot: memoryview) -> None:
        """Copy blocks of vLLM into a slot, one after the other."""
        target = np.frombuffer(slot, np.uint8)
        start = 0
        for block in blocks:
            for rows in self._layers:
                end = start + rows.shape[1]
                target[start:end] = rows[block]
                start = end
        assert start == len(target), "a slot is as long as its blocks"

    def scatter(self, slot: memoryview, blocks: Sequence[int]) -> None:
        """Copy a slot into blocks of vLLM; what is meant for a negative one is left out."""
        source = np.frombuffer(slot, np.uint8)
        assert len(source) == len(blocks) * self.block_bytes, "a slot is as long as its blocks"
        start = 0
        for block in blocks:
            for rows in self._layers:
                end = start + rows.shape[1]
                if block >= 0:
                    rows[block] = source[start:end]
                start = end


def _distinct(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Leave out layers that share another one's KV."""
    seen: set[int] = set()
    distinct: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            distinct.append((name, tensor))
    return distinct


def _rows(name: str, tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a tensor whose first dimension is the block as one row of bytes a block."""
    if tensor.device.type != "cpu":
        raise ValueError(f"layer {name} is on {tensor.device}, and only CPUs are served so far")
    inner = list(zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    num_elements = tensor[0].numel()
    expected = 1
    for length, stride in sorted(inner, key=lambda dimension: dimension[1]):
        if length > 1 and stride != expected:
            raise ValueError(f"layer {name} has a block in pieces: strides {tensor.stride()}")
        expected *= length
    rows = tensor.detach().as_strided((len(tensor), num_elements), (tensor.stride(0), 1))
    as_bytes: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy()
    return as_bytes
