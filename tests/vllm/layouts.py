"""KV tensors as vLLM arranges them: one allocation, and a view of each layer into it."""

from collections.abc import Mapping

import torch

ORDERS: Mapping[str, tuple[int, ...]] = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""How the dimensions lie in memory, by vLLM's name for it."""

SHAPE = (3, 6, 2, 4, 8)
"""Layers, blocks, heads, tokens, content."""
NUM_BLOCKS = SHAPE[1]

Tensors = dict[str, torch.Tensor]


def in_one(
    layout: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE
) -> Tensors:
    """All layers in one allocation, as 0.30 and later have them."""
    order = ORDERS[layout]
    whole = torch.zeros([shape[each] for each in order], dtype=dtype)
    logical = whole.permute([order.index(each) for each in range(len(shape))])
    return {f"layer{number}": logical[number] for number in range(shape[0])}


def of_its_own(layout: str, dtype: torch.dtype = torch.float32) -> Tensors:
    """An allocation for each layer, as 0.28 has them."""
    return {
        f"layer{number}": in_one(layout, dtype, (1, *SHAPE[1:]))["layer0"]
        for number in range(SHAPE[0])
    }


def padded(layout: str, dtype: torch.dtype = torch.float32) -> Tensors:
    """Blocks that are further apart than they are long."""
    wide = in_one(layout, dtype, (SHAPE[0], 2 * NUM_BLOCKS, *SHAPE[2:]))
    return {name: tensor[::2] for name, tensor in wide.items()}


def in_odd_places(layout: str, dtype: torch.dtype = torch.float32) -> Tensors:
    """One allocation, and layers that do not lie evenly in it."""
    whole = in_one(layout, dtype, (SHAPE[0] + 2, *SHAPE[1:]))
    return {name: whole[name] for name in ("layer3", "layer0", "layer1")}


MAKERS = (in_one, of_its_own, padded, in_odd_places)


def fill(tensors: Tensors, seed: int) -> None:
    """Put noise into every layer; of one seed it is the same wherever the tensors are."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        noise = torch.randint(0, 256, (*tensor.shape, tensor.element_size()), generator=generator)
        tensor.copy_(noise.to(torch.uint8).view(tensor.dtype).squeeze(-1))


def content(tensors: Tensors, block: int, layout: str) -> bytes:
    """Return a block's bytes as they must come out: each layer's as they lie in memory."""
    order = [each - 2 for each in ORDERS[layout] if each > 1]
    parts = [tensor[block].permute(order).contiguous() for tensor in tensors.values()]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)
