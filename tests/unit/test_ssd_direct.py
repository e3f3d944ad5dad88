"""Whether blocks go around the page cache: where a file system refuses, and what is left in it."""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from ssd_files import CAPACITY_BYTES, SEGMENT_BYTES, Opener, blocks_of

from kvtier.errors import StartError
from kvtier.testing.block import aligned_memory, make_block, read_of
from kvtier.testing.tier_contract import fetch, soon, store
from kvtier.tiers.base import BlockWrite, WriteOutcome
from kvtier.tiers.ssd.disk import DirectIO
from kvtier.tiers.ssd.options import SsdOptions
from kvtier.tiers.ssd.store import SsdTier

PAGE_BYTES = 4096


def refusing_direct() -> Callable[[str], None]:
    """A file system that refuses the first probe, which is the one for direct I/O."""
    refusals = [OSError(errno.EINVAL, os.strerror(errno.EINVAL))]

    def hook(step: str) -> None:
        if step == "probe" and refusals:
            raise refusals.pop()

    return hook


def num_cached(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as pages:
        view = np.frombuffer(pages, np.uint8)
        told = (ctypes.c_ubyte * (size // PAGE_BYTES))()
        failed = mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), told)
        del view
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in told)


def drops_pages(directory: Path) -> bool:
    """Tell whether the file system lets go of pages at all: one in memory does not."""
    path = directory / "pages"
    path.write_bytes(bytes(8 * PAGE_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return num_cached(path) == 0


def test_where_direct_io_is_refused_blocks_are_kept_all_the_same_and_it_is_said(
    ssd: Opener,
) -> None:
    tier = ssd(options=SsdOptions(hook=refusing_direct()))
    assert tier.usage().detail["direct_io"] is False
    blocks = blocks_of(range(3))
    store(tier, *blocks)
    assert fetch(tier, *blocks) == [None] * 3


def test_where_it_must_be_and_cannot_the_start_says_so(tmp_path: Path) -> None:
    options = SsdOptions(DirectIO.ON, hook=refusing_direct())
    with pytest.raises(StartError) as raised:
        SsdTier(tmp_path / "ssd", CAPACITY_BYTES, SEGMENT_BYTES, options)
    assert raised.value.field == "ssd.direct_io"
    SsdTier(tmp_path / "ssd", CAPACITY_BYTES, SEGMENT_BYTES).close()  # nor is the lock left behind


@pytest.mark.parametrize("mode", DirectIO)
def test_any_length_is_kept_from_any_address_and_read_to_any(ssd: Opener, mode: DirectIO) -> None:
    tier = ssd(options=SsdOptions(mode))
    cases = product([0, 1, 64, 4095], [1, 4095, 4096, 4097, 12_288])
    for number, (shift, payload_bytes) in enumerate(cases):
        block = make_block(number, payload_bytes)
        memory = aligned_memory(PAGE_BYTES + payload_bytes)[shift : shift + payload_bytes]
        memory[:] = block.payload
        report = tier.write([BlockWrite(block.header, memory)], soon())
        assert report.outcomes == (WriteOutcome.STORED,), (shift, payload_bytes)
        memory[:] = bytes(payload_bytes)
        assert tier.read([read_of(block, memory)], soon()) == [block.header]
        assert memory == block.payload, (shift, payload_bytes)


@pytest.mark.parametrize("mode", [DirectIO.AUTO, DirectIO.OFF])
def test_what_is_written_and_read_leaves_the_page_cache_to_others(
    ssd: Opener, tmp_path: Path, mode: DirectIO
) -> None:
    if not drops_pages(tmp_path):
        pytest.skip("the file system has its files in memory")
    tier = ssd(options=SsdOptions(mode))
    blocks = blocks_of(range(8))
    store(tier, *blocks)
    (path,) = ssd.segments()
    heads_pages = len(blocks) + 2  # what recovery and marking look at, at the most
    assert num_cached(path) <= heads_pages, "written blocks are left there"
    assert fetch(tier, *blocks) == [None] * len(blocks)
    assert num_cached(path) <= heads_pages, "blocks that were read are left there"
