"""The arena, made known to a device piece by piece; what it does not take is copied twice."""

import pytest

from kvtier.connectors.kit.device import PinnedArena
from tests.vllm.lazy_device import LazyDevice

PIECE_BYTES = 1000


@pytest.fixture
def device() -> LazyDevice:
    return LazyDevice()


@pytest.fixture
def arena() -> memoryview:
    return memoryview(bytearray(3500))


def test_slots_within_a_piece_are_covered(device: LazyDevice, arena: memoryview) -> None:
    pinned = PinnedArena(device, PIECE_BYTES)
    assert not pinned.covers(arena[:100])
    pinned.pin(arena, lambda: False)
    assert [len(each) for each in device.known] == [1000, 1000, 1000, 500]
    assert pinned.covers(arena[:1000])
    assert pinned.covers(arena[3400:])
    assert not pinned.covers(arena[950:1050]), "no copy may cross pieces"
    assert not pinned.covers(memoryview(bytearray(10)))
    pinned.unpin(arena)
    assert not device.known
    assert not pinned.covers(arena[:100])


def test_it_ends_with_the_daemon(device: LazyDevice, arena: memoryview) -> None:
    looks = iter([False, False, True])
    pinned = PinnedArena(device, PIECE_BYTES)
    pinned.pin(arena, lambda: next(looks))
    assert len(device.known) == 2
    pinned.unpin(arena)
    assert not device.known


def test_a_device_that_takes_no_more_is_said_once(
    device: LazyDevice, arena: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    device.num_known_most = 2
    pinned = PinnedArena(device, PIECE_BYTES)
    pinned.pin(arena, lambda: False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "does not take the arena" in caplog.text
    assert pinned.covers(arena[:1000])
    assert not pinned.covers(arena[2000:2100])
    pinned.unpin(arena)
    assert not device.known


def test_arenas_come_and_go_on_their_own(device: LazyDevice, arena: memoryview) -> None:
    pinned = PinnedArena(device, PIECE_BYTES)
    pinned.pin(arena, lambda: False)
    other = memoryview(bytearray(1500))
    pinned.pin(other, lambda: False)
    pinned.unpin(arena)
    assert pinned.covers(other[:100])
    assert not pinned.covers(arena[:100])
