"""What every device promises, the lazy one of the tests and the real one where there is one."""

import threading
from collections.abc import Iterator

import pytest
import torch

from kvtier.connectors.kit.device import CudaDevice, Device, is_reached
from tests.vllm.lazy_device import POISON, LazyDevice

WORD = torch.int64
ROWS, WIDTH = 4, 1 << 14


@pytest.fixture(
    params=[
        "lazy",
        "eager",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda":
        yield CudaDevice(torch.device("cuda", torch.cuda.device_count() - 1))
    else:
        yield LazyDevice(is_eager=request.param == "eager")


def noise(*size: int) -> torch.Tensor:
    return torch.randint(-(1 << 60), 1 << 60, size, generator=torch.Generator().manual_seed(1))


def there_and_back(device: Device, content: torch.Tensor) -> torch.Tensor:
    lane = device.lane()
    with lane:
        near, far, back = (
            lane.empty_host(content.shape, WORD),
            lane.empty(content.shape, WORD),
            lane.empty_host(content.shape, WORD),
        )
        near.copy_(content)
        lane.copy(far, near)
        lane.copy(back, far)
        mark = lane.mark()
    mark.wait()
    assert mark.is_over()
    return back


def test_what_is_marked_is_done_after_a_wait(device: Device) -> None:
    content = noise(ROWS, WIDTH)
    assert torch.equal(there_and_back(device, content), content)


def test_rows_are_gathered_and_scattered_whatever_their_strides(device: Device) -> None:
    content, index = noise(2, ROWS, 3, WIDTH), torch.tensor([3, 0])
    lane = device.lane()
    with lane:
        near, far = lane.empty_host(content.shape, WORD), lane.empty(content.shape, WORD)
        near.copy_(content)
        lane.copy(far, near)
        near_index, far_index = lane.empty_host((2,), WORD), lane.empty((2,), WORD)
        near_index.copy_(index)
        lane.copy(far_index, near_index)
        # Rows that are apart, as a layer's blocks are; and a part of rows, as a plane's are.
        rows = far.permute(1, 2, 0, 3)[..., : WIDTH // 2]
        taken = lane.empty((2, 3 * 2 * WIDTH), WORD)
        part = taken[:, : 3 * WIDTH].view(2, 3, 2, WIDTH // 2)
        lane.gather(rows, far_index, part)
        others = far.permute(1, 2, 0, 3)[..., WIDTH // 2 :]
        lane.scatter(others, far_index, part)
        back = lane.empty_host(content.shape, WORD)
        lane.copy(back, far)
        mark = lane.mark()
    mark.wait()
    wanted = content.clone()
    wanted[:, index, :, WIDTH // 2 :] = content[:, index, :, : WIDTH // 2]
    assert torch.equal(back, wanted)


def test_lanes_are_used_by_threads_of_their_own(device: Device) -> None:
    content = [noise(ROWS, WIDTH) + number for number in range(3)]
    came: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        came[number] = there_and_back(device, content[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(came[number], content[number]) for number in range(3))


def test_a_fence_is_reached_when_what_was_begun_before_is_over(device: Device) -> None:
    assert is_reached(device.fence(), 10)
    fence = device.fence()
    fence.wait()
    assert fence.is_over()


def test_a_device_without_room_says_so(device: Device) -> None:
    lane = device.lane()
    with lane, pytest.raises(MemoryError):
        lane.empty((1 << 24, 1 << 17), torch.uint8)


def test_what_was_begun_is_not_done_yet() -> None:
    """The lazy device is worth something only where haste shows."""
    device = LazyDevice()
    lane = device.lane()
    with lane:
        near, far = lane.empty_host((1, 8), WORD), lane.empty((1, 8), WORD)
        lane.copy(near, far.zero_())
        mark = lane.mark()
    assert near.view(torch.uint8)[0, 0] == POISON
    assert device.num_under_way == 1
    mark.wait()
    assert not near.any()


def test_a_fence_that_is_not_reached_in_time_is_given_up() -> None:
    device = LazyDevice()
    device.is_stuck = True
    assert not is_reached(device.fence(), 0.02)
