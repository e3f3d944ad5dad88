"""The worker half before a device that does nothing until it must, against a real daemon."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from kvtier.client import ClientDeadlines
from kvtier.connectors.kit.device_copies import DeviceCopier
from kvtier.connectors.kit.pages import Pages
from kvtier.connectors.vllm.stats import LOAD_BYTES, STAGED_BYTES
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.integration.pattern import num_arenas
from tests.vllm.lazy_device import LazyDevice
from tests.vllm.small_vllm import SmallVllm

pytestmark = pytest.mark.slow

TOKENS = list(range(1000, 1300))
BLOCKS = list(range(1, 20))
OTHERS = list(range(21, 40))
NUM_FULL = 16


class DeviceVllm(SmallVllm):
    """Computes on a device, where everything comes later."""

    def __init__(
        self, socket: Path, device: LazyDevice, deadlines: ClientDeadlines | None = None
    ) -> None:
        def copies(pages: Pages) -> DeviceCopier:
            return DeviceCopier(pages, device, 3 * pages.block_bytes)

        super().__init__(socket, deadlines=deadlines, copies=copies)
        self.device = device
        device.is_computing = True

    def compute(self, tokens: list[int], blocks: list[int], start: int = 0) -> None:
        self.device.compute.begin(partial(super().compute, tokens, blocks, start))

    def begin_zeroing(self, blocks: list[int]) -> None:
        """As vLLM does with blocks that it gives to a request."""
        for tensor in self.tensors.values():
            self.device.compute.begin(lambda tensor=tensor: tensor[blocks].zero_())

    def content(self, blocks: list[int]) -> list[torch.Tensor]:
        self.device.fence().wait()
        return super().content(blocks)


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        yield RunningNode(directory)


@pytest.mark.parametrize("is_eager", [False, True])
def test_blocks_come_back_as_they_were_computed(node: RunningNode, is_eager: bool) -> None:
    with node.daemon(), DeviceVllm(node.socket, LazyDevice(is_eager=is_eager)) as first:
        assert first.prefill(TOKENS, BLOCKS) == (0, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4
        before = first.content(BLOCKS[:NUM_FULL])
        with DeviceVllm(node.socket, LazyDevice(is_eager=is_eager)) as second:
            # What vLLM has begun on the blocks before must not come after the load.
            late = partial(second.begin_zeroing, OTHERS)
            assert second.prefill(TOKENS, OTHERS, before_copy=late) == (256, set())
            assert not second.device.num_under_way
            after = second.content(OTHERS[:NUM_FULL])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert before[0].any()
        assert not first.pool.references
        node.await_idle()


def test_the_arena_is_copied_from_and_to_directly(node: RunningNode) -> None:
    with node.daemon() as daemon, DeviceVllm(node.socket, LazyDevice()) as small:
        device = small.device
        await_true(lambda: device.known, "the arena is known")
        assert small.prefill(TOKENS, BLOCKS) == (0, set())
        before = small.content(BLOCKS[:NUM_FULL])
        stored = device.num_direct
        assert stored
        assert small.prefill(TOKENS, OTHERS) == (256, set())
        assert STAGED_BYTES.name not in small.worker.take_counts()
        assert device.num_direct > stored
        assert all(map(torch.equal, before, small.content(OTHERS[:NUM_FULL])))
        daemon.kill()
        await_true(lambda: not device.known, "an arena is forgotten with its daemon")
        with node.daemon():
            await_true(lambda: device.known, "the next one is known")
            assert small.prefill(TOKENS, BLOCKS)[1] == set()


def test_what_the_device_does_not_know_is_counted_as_staged(node: RunningNode) -> None:
    device = LazyDevice()
    device.num_known_most = 0
    with node.daemon(), DeviceVllm(node.socket, device) as small:
        small.prefill(TOKENS, BLOCKS)
        small.prefill(TOKENS, OTHERS)
        counts = small.worker.take_counts()
        (num_bytes,) = counts[LOAD_BYTES.name][""]
        assert num_bytes
        assert counts[STAGED_BYTES.name][""] == [2 * num_bytes], "on its way there and back"


class HangingDevice(LazyDevice):
    """Does not come back from being shown memory."""

    def __init__(self) -> None:
        super().__init__()
        self.is_shown, self.gate = threading.Event(), threading.Event()

    def register(self, address: int, num_bytes: int) -> bool:
        self.is_shown.set()
        self.gate.wait(60)
        return False


def test_a_device_that_hangs_over_an_arena_costs_no_later_session(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.client.keeper._CLOSE_TIMEOUT_S", 0.5)
    device, daemon, num_before = HangingDevice(), node.daemon(), num_arenas()
    with DeviceVllm(node.socket, device) as small:
        assert device.is_shown.wait(10)
        daemon.kill()
        await_true(lambda: not any(each.is_attached for each in small.clients), "it is gone")
        with node.daemon():
            await_true(lambda: all(each.is_attached for each in small.clients), "both are back")
            small.prefill(TOKENS, BLOCKS)
            assert small.prefill(TOKENS, OTHERS) == (256, set())
        device.gate.set()
    assert "the arena is in use still" in caplog.text
    await_true(lambda: num_arenas() == num_before, "and its memory is free again in the end")


def test_host_and_device_share_blocks(node: RunningNode) -> None:
    with node.daemon(), SmallVllm(node.socket) as first:
        assert first.prefill(TOKENS, BLOCKS) == (0, set())
        with DeviceVllm(node.socket, LazyDevice()) as second:
            assert second.prefill(TOKENS, OTHERS) == (256, set())
            after = second.content(OTHERS[:NUM_FULL])
        before = first.content(BLOCKS[:NUM_FULL])
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_device_that_hangs_costs_no_more_than_the_deadline(node: RunningNode) -> None:
    deadlines = ClientDeadlines(5, 0.5, 0.5, 0.1)
    with node.daemon(), DeviceVllm(node.socket, LazyDevice(), deadlines) as small:
        assert small.prefill(TOKENS, BLOCKS) == (0, set())
        small.device.is_stuck = True
        assert small.prefill(TOKENS, OTHERS) == (256, set(OTHERS[:NUM_FULL]))
        assert not small.pool.references, "its stores are over as well"
        small.device.is_stuck = False
        await_true(lambda: small.prefill(TOKENS, OTHERS) == (256, set()), "it serves again")
        node.await_idle()


def test_a_device_that_fails_leaves_blocks_missing(node: RunningNode) -> None:
    with node.daemon(), DeviceVllm(node.socket, LazyDevice()) as small:
        assert small.prefill(TOKENS, BLOCKS) == (0, set())
        for lane in small.device.lanes:
            lane.fault = RuntimeError("CUDA error: an illegal memory access was encountered")
        assert small.prefill(TOKENS, OTHERS) == (256, set(OTHERS[:NUM_FULL]))
        other_tokens = [token + 5000 for token in TOKENS]
        assert small.prefill(other_tokens, OTHERS) == (0, set())
        assert node.stat()["tiers"]["cpu"]["blocks"] == 4, "nothing of a failed store is kept"
        assert not small.pool.references
        node.await_idle()
