"""vLLM's tensors as bytes: what comes out depends on layout and content alone."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
import torch

from kvtier.connectors.kit.copies import HostCopier, open_copies
from kvtier.connectors.kit.pages import Pages
from tests.vllm.layouts import MAKERS, NUM_BLOCKS, ORDERS, SHAPE, content, fill, in_one, of_its_own

ROOT = Path(__file__).resolve().parents[2]
RELEASES = [each for each in os.environ.get("KVTIER_VLLM", "").split() if each != "0.28"]
"""With layouts to choose from; 0.28 has a tensor for each layer."""

EVERY = [
    pytest.param(*each, id=f"{each[0]}-{each[1].__name__}-{str(each[2]).removeprefix('torch.')}")
    for each in product(
        ORDERS, MAKERS, (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
    )
]


def gather(pages: Pages, *blocks: int) -> bytes:
    slot = memoryview(bytearray(len(blocks) * pages.block_bytes))
    list(HostCopier(pages).gather([blocks], [slot]))
    return bytes(slot)


@pytest.mark.parametrize(("layout", "make", "dtype"), EVERY)
def test_bytes_come_in_the_order_of_the_layout(layout, make, dtype):
    tensors = make(layout, dtype)
    fill(tensors, seed=1)
    pages = Pages(tensors, NUM_BLOCKS)
    assert pages.num_layers == SHAPE[0]
    wanted = content(tensors, 4, layout) + content(tensors, 1, layout)
    assert gather(pages, 4, 1) == wanted


@pytest.mark.parametrize(("layout", "make", "dtype"), EVERY)
def test_blocks_come_back_and_others_stay(layout, make, dtype):
    before, after = make(layout, dtype), make(layout, dtype)
    fill(before, seed=2)
    fill(after, seed=3)
    others = {name: tensor.clone() for name, tensor in after.items()}
    slot = memoryview(bytearray(gather(Pages(before, NUM_BLOCKS), 0, 5, 2)))
    HostCopier(Pages(after, NUM_BLOCKS)).scatter([slot], [[3, -1, 0]])
    for name, tensor in after.items():
        for block in range(NUM_BLOCKS):
            source = {3: before[name][0], 0: before[name][2]}.get(block, others[name][block])
            got = tensor[block].contiguous().view(torch.uint8)
            assert torch.equal(got, source.contiguous().view(torch.uint8)), (name, block)


def test_layers_that_lie_evenly_are_one_plane():
    assert all(len(Pages(in_one(each), NUM_BLOCKS).planes) == 1 for each in ORDERS)
    assert len(Pages(of_its_own("LBHNC"), NUM_BLOCKS).planes) == SHAPE[0]


def test_a_page_is_one_run_where_it_can_be():
    dimensions = {each: Pages(in_one(each), NUM_BLOCKS).planes[0].words.dim() for each in ORDERS}
    assert dimensions == dict.fromkeys(ORDERS, 3) | {"LHBNC": 4, "BHLNC": 4}


def test_smaller_blocks_of_attention_make_one_of_the_scheduler():
    """Attention works on blocks of 4 tokens, the scheduler on 8: two lie side by side."""
    tensors = in_one("LBHNC")
    fill(tensors, seed=4)
    pages = Pages(tensors, NUM_BLOCKS // 2)
    halves = [tensor[each].numpy().tobytes() for tensor in tensors.values() for each in (2, 3)]
    assert gather(pages, 1) == b"".join(halves)
    with pytest.raises(IndexError, match="3 blocks, and no block 3"):
        gather(pages, 3)


def test_one_head_makes_no_difference_to_the_order():
    """Dimensions of one have any stride: what lies there is the same."""
    shape = (3, NUM_BLOCKS, 1, 4, 8)
    found = set()
    for layout in ORDERS:
        tensors = in_one(layout, shape=shape)
        fill(tensors, seed=5)
        found.add(gather(Pages(tensors, NUM_BLOCKS), 2))
    assert len(found) == 1


@pytest.mark.parametrize("content_length", [1, 3, 6])
def test_odd_lengths_are_moved_by_smaller_words(content_length):
    tensors = in_one("LBHNC", torch.uint8, (3, NUM_BLOCKS, 1, 5, content_length))
    fill(tensors, seed=6)
    assert gather(Pages(tensors, NUM_BLOCKS), 3) == content(tensors, 3, "LBHNC")


def test_tensors_made_for_inference_are_written_to():
    with torch.inference_mode():
        tensors = in_one("LBHNC")
    pages = Pages(tensors, NUM_BLOCKS)
    slot = memoryview(bytearray(b"\x01" * pages.block_bytes))
    HostCopier(pages).scatter([slot], [[2]])
    assert gather(pages, 2) == bytes(slot)


def test_layers_that_share_are_moved_once():
    tensors = in_one("LBHNC")
    tensors["shared"] = tensors["layer0"]
    assert Pages(tensors, NUM_BLOCKS).num_layers == SHAPE[0]


REFUSED = {
    "no KV cache": dict[str, torch.Tensor](),
    "layer a has no 6 blocks: its shape is 4096": {"a": torch.zeros(4096)},
    "layer a has no 6 blocks: its shape is 2x6x4x8": {"a": torch.zeros(2, 6, 4, 8)},
    "layer a has no 6 blocks: its shape is 0x4": {"a": torch.zeros(0, 4)},
    "layer a overlaps itself": {"a": torch.zeros(6, 1, 8).expand(6, 4, 8)},
    "on several devices: ['cpu', 'meta']": {
        "a": torch.zeros(6, 8),
        "b": torch.zeros(6, 8, device="meta"),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_cache_of_blocks_is_refused_by_name(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Pages(REFUSED[message], NUM_BLOCKS)


def test_a_device_of_another_kind_is_refused():
    pages = Pages({"a": torch.zeros(6, 8, device="meta")}, NUM_BLOCKS)
    with pytest.raises(ValueError, match="blocks are on meta; supported are CPUs and CUDA"):
        open_copies(pages)


@pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")
@pytest.mark.parametrize("release", RELEASES)
def test_blocks_are_found_in_what_a_release_allocates(release):
    python = ROOT / ".vllm" / release / "bin" / "python"
    script = Path(__file__).with_name("in_vllm_pages.py")
    words = [str(python), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{re.escape(release)}\.\d+: ok", done.stdout, re.MULTILINE), done.stdout
