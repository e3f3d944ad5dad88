"""Copies through stages: the same bytes as on the host, and nothing under way when a call ends."""

import gc
import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from kvtier.connectors.kit.copies import BlockCopier, HostCopier
from kvtier.connectors.kit.device import CudaDevice
from kvtier.connectors.kit.device_copies import DeviceCopier
from kvtier.connectors.kit.pages import Pages
from tests.vllm.layouts import MAKERS, NUM_BLOCKS, ORDERS, Tensors, fill, in_one, of_its_own
from tests.vllm.lazy_device import LazyDevice

BLOCKS = [(4, 1), (0, 5), (3, 2)]
"""Of vLLM's, for three of ours."""


def lazy_copies(
    pages: Pages, stage_blocks: int = 1, **about: bool
) -> tuple[BlockCopier, LazyDevice]:
    device = LazyDevice(**about)
    copies = DeviceCopier(pages, device, stage_blocks * pages.block_bytes)
    device.is_computing = True
    return copies, device


def make_slots(pages: Pages, blocks: Sequence[Sequence[int]]) -> list[memoryview]:
    return [memoryview(bytearray(len(each) * pages.block_bytes)) for each in blocks]


def gathered(
    copies: BlockCopier, pages: Pages, blocks: Sequence[Sequence[int]] = BLOCKS
) -> list[bytes]:
    slots = make_slots(pages, blocks)
    yielded = [bytes(slots[place]) for place, _ in enumerate(copies.gather(blocks, slots))]
    assert yielded == [bytes(slot) for slot in slots], "a slot is whole when it is said to be"
    return yielded


def made(make: Callable[[str], Tensors] = in_one, layout: str = "LBHNC", seed: int = 1) -> Pages:
    tensors = make(layout)
    fill(tensors, seed)
    return Pages(tensors, NUM_BLOCKS)


@pytest.mark.parametrize("stage_blocks", [1, 2, 4])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("layout", ORDERS)
def test_bytes_are_those_of_the_host(layout, make, stage_blocks):
    before, after = made(make, layout), made(make, layout, seed=2)
    wanted = gathered(HostCopier(before), before)
    copies, device = lazy_copies(before, stage_blocks)
    assert gathered(copies, before) == wanted
    into = [(1, 3), (-1, 4), (5, 0)]
    back, other = lazy_copies(after, stage_blocks)
    back.scatter([memoryview(bytearray(each)) for each in wanted], into)
    assert not device.num_under_way + other.num_under_way
    twin = made(make, layout, seed=2)
    HostCopier(twin).scatter([memoryview(bytearray(each)) for each in wanted], into)
    everything = [range(NUM_BLOCKS)]
    assert gathered(HostCopier(after), after, everything) == gathered(
        HostCopier(twin), twin, everything
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", ORDERS)
def test_bytes_on_a_gpu_are_those_of_the_host(layout):
    pages = made(of_its_own, layout)
    tensors = of_its_own(layout)
    fill(tensors, 1)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    there = Pages({name: each.to(device) for name, each in tensors.items()}, NUM_BLOCKS)
    copies = DeviceCopier(there, CudaDevice(device), 2 * there.block_bytes)
    wanted = gathered(HostCopier(pages), pages)
    assert gathered(copies, there) == wanted
    copies.scatter([memoryview(bytearray(each)) for each in wanted], [(1, 3), (-1, 4), (5, 0)])
    assert gathered(copies, there, [(1, 3)]) == wanted[:1]
    copies.close()


@pytest.mark.parametrize("stage_blocks", [1, 2, 3, 100])
def test_what_the_device_knows_is_copied_directly(stage_blocks):
    pages = made()
    copies, device = lazy_copies(pages, stage_blocks)
    wanted = gathered(HostCopier(pages), pages)
    arena = memoryview(bytearray(sum(map(len, wanted))))
    slots = [
        arena[start : start + len(wanted[0])] for start in range(0, len(arena), len(wanted[0]))
    ]
    copies.arena.pin(arena[: len(arena) // 2], lambda: False)
    yielded = [bytes(slots[place]) for place, _ in enumerate(copies.gather(BLOCKS, slots))]
    assert yielded == wanted, "the first is known, the second by half, and the third is not"
    assert device.num_direct == (2 if stage_blocks == 1 else 1)
    after = made(seed=2)
    back, other = lazy_copies(after, stage_blocks)
    back.arena.pin(arena, lambda: False)
    back.scatter(slots, BLOCKS)
    assert gathered(HostCopier(after), after) == wanted
    assert other.num_direct
    for each, those in ((copies, device), (back, other)):
        each.arena.unpin(arena)
        assert not those.known
    direct = device.num_direct
    assert gathered(copies, pages) == wanted
    assert device.num_direct == direct


def test_nothing_is_under_way_once_a_gather_is_given_up():
    pages = made()
    copies, device = lazy_copies(pages)
    slots = make_slots(pages, BLOCKS)
    filling = copies.gather(BLOCKS, slots)
    next(filling)
    assert device.num_under_way, "the next batch is begun before this one is taken"
    filling.close()
    assert not device.num_under_way
    assert not any(slots[2]), "a slot that nobody wants any more is left alone"
    assert gathered(copies, pages) == gathered(HostCopier(pages), pages), "the desk is free again"


@pytest.mark.parametrize("stage_blocks", [1, 2, 100])
def test_nothing_is_under_way_after_a_fault(stage_blocks):
    pages = made()
    copies, device = lazy_copies(pages, stage_blocks)
    slots = make_slots(pages, BLOCKS)
    filling = copies.gather(BLOCKS, slots)
    next(filling)
    for lane in device.lanes:
        lane.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    if stage_blocks < 6:
        with pytest.raises(RuntimeError, match="illegal"):
            list(filling)
    with pytest.raises(RuntimeError, match="illegal"):
        copies.scatter(slots, BLOCKS)
    assert not device.num_under_way
    for lane in device.lanes:
        lane.fault = None
    filling.close()
    assert gathered(copies, pages) == gathered(HostCopier(pages), pages)


@pytest.mark.parametrize("block", [NUM_BLOCKS, 1 << 40])
@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_block_that_vllm_does_not_have_touches_nothing(block, is_on_host):
    pages = made()
    copies, device = (HostCopier(pages), None) if is_on_host else lazy_copies(pages)
    before = gathered(copies, pages)
    slots = make_slots(pages, BLOCKS[:1])
    with pytest.raises(IndexError, match=f"6 blocks, and no block {block}"):
        list(copies.gather([(1, block)], slots))
    with pytest.raises(IndexError, match=f"6 blocks, and no block {block}"):
        copies.scatter(slots, [(1, block)])
    assert not any(slots[0])
    assert gathered(copies, pages) == before
    assert device is None or not device.num_under_way


def test_a_gather_wants_real_blocks():
    pages = made()
    for copies in (HostCopier(pages), lazy_copies(pages)[0]):
        with pytest.raises(IndexError, match="no block -1"):
            list(copies.gather([(-1, 1)], make_slots(pages, BLOCKS[:1])))


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_slot_of_another_length_is_a_bug(is_on_host):
    pages = made()
    copies = HostCopier(pages) if is_on_host else lazy_copies(pages)[0]
    with pytest.raises(AssertionError, match="as long as its blocks"):
        copies.scatter(make_slots(pages, BLOCKS[:1]), [(1, 2, 3)])


def test_where_memory_is_short_stages_are_smaller():
    pages = made()
    stages = 6 * (pages.block_bytes + 8)
    for rows in (1, 2, 3, 5):
        device = LazyDevice(memory_bytes=rows * stages)
        copies = DeviceCopier(pages, device, 8 * pages.block_bytes)
        assert gathered(copies, pages) == gathered(HostCopier(pages), pages)
        assert device.free_bytes >= 0


def test_where_there_is_no_memory_it_is_said_in_one_line():
    pages = made()
    with pytest.raises(ValueError, match="no memory left to stage blocks of 768 bytes; lower"):
        DeviceCopier(pages, LazyDevice(memory_bytes=pages.block_bytes), 1 << 20)


def test_all_memory_is_given_back():
    pages = made()
    device = LazyDevice()
    before = device.free_bytes
    copies = DeviceCopier(pages, device, 2 * pages.block_bytes)
    assert gathered(copies, pages)
    assert before - device.free_bytes == 6 * 2 * (pages.block_bytes + 8)
    copies.close()
    gc.collect()
    assert device.free_bytes == before
    assert not device.host_places


def test_a_stage_holds_at_least_one_block():
    pages = made()
    assert gathered(DeviceCopier(pages, LazyDevice(), 1), pages)


def test_readers_and_the_writer_work_at_a_time():
    pages = made()
    copies, device = lazy_copies(pages, is_eager=True)
    wanted = gathered(copies, pages)
    results: list[object] = []

    def write() -> None:
        results.extend(gathered(copies, pages) == wanted for _ in range(20))

    def read(into: Sequence[int]) -> None:
        for _ in range(20):
            copies.scatter([memoryview(bytearray(wanted[0]))], [into])
        results.append(True)

    # A reader writes to blocks that the writer does not read: here those that have that content.
    threads = [threading.Thread(target=write)]
    threads += [threading.Thread(target=read, args=[(4, 1)]) for _ in range(copies.num_readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results.count(True) == 20 + copies.num_readers
    assert not device.num_under_way
    copies.close()
