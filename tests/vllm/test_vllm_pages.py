"""vLLM's tensors as bytes: blocks come back whole whatever the strides; odd ones are refused."""

import pytest
import torch

from kvtier.connectors.vllm.pages import Pages

NUM_BLOCKS, NUM_HEADS, NUM_TOKENS, CONTENT = 6, 2, 4, 8


def of_its_own() -> dict[str, torch.Tensor]:
    """A tensor for each layer, as 0.28 has them."""
    shape = (NUM_BLOCKS, NUM_HEADS, NUM_TOKENS, CONTENT)
    return {f"layer{number}": torch.zeros(shape) for number in range(3)}


def in_one() -> dict[str, torch.Tensor]:
    """All layers in one allocation, layer after layer, as later releases have them."""
    whole = torch.zeros((3, NUM_BLOCKS, NUM_HEADS, NUM_TOKENS, CONTENT), dtype=torch.bfloat16)
    return {f"layer{number}": whole[number] for number in range(3)}


def block_outermost() -> dict[str, torch.Tensor]:
    """All layers of a block side by side."""
    whole = torch.zeros((NUM_BLOCKS, 3, NUM_HEADS, NUM_TOKENS, CONTENT))
    return {f"layer{number}": whole[:, number] for number in range(3)}


def tokens_first() -> dict[str, torch.Tensor]:
    """Heads inside of tokens: a page is still one run of bytes."""
    shape = (NUM_BLOCKS, NUM_TOKENS, NUM_HEADS, CONTENT)
    return {f"layer{number}": torch.zeros(shape).transpose(1, 2) for number in range(3)}


@pytest.mark.parametrize("make", [of_its_own, in_one, block_outermost, tokens_first])
def test_blocks_come_back(make):
    tensors = make()
    for number, tensor in enumerate(tensors.values()):
        values = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
        tensor.copy_(values + 1000 * number)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    pages = Pages(tensors)
    assert (pages.num_layers, pages.num_blocks) == (3, NUM_BLOCKS)
    slot = memoryview(bytearray(2 * pages.block_bytes))
    pages.gather([4, 1], slot)
    for tensor in tensors.values():
        tensor.zero_()
    pages.scatter(slot, [4, 1])
    for name, tensor in tensors.items():
        for block in range(NUM_BLOCKS):
            wanted = before[name][block] if block in {4, 1} else torch.zeros_like(tensor[block])
            assert torch.equal(tensor[block], wanted), (name, block)


def test_a_block_that_is_there_is_left_alone():
    tensors = of_its_own()
    pages = Pages(tensors)
    slot = memoryview(bytearray(b"\x01" * 2 * pages.block_bytes))
    pages.scatter(slot, [-1, 3])
    touched = {block for block in range(NUM_BLOCKS) if tensors["layer0"][block].any()}
    assert touched == {3}


def test_layers_that_share_are_moved_once():
    tensors = of_its_own()
    tensors["shared"] = tensors["layer0"]
    assert Pages(tensors).num_layers == 3


def test_a_block_in_pieces_is_refused_by_name():
    wide = torch.zeros((NUM_BLOCKS, NUM_HEADS, NUM_TOKENS, 2 * CONTENT))
    with pytest.raises(ValueError, match="layer odd has a block in pieces"):
        Pages({"odd": wide[..., :CONTENT]})


def test_nothing_is_refused():
    with pytest.raises(ValueError, match="no KV cache"):
        Pages({})
