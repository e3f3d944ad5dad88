"""Reading blocks: where they are, neighbours together, and nothing served unchecked."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.identity import BlockHeader
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import BlockRead, MissReason
from kvtier.tiers.check import check_header, check_payload
from kvtier.tiers.ssd.disk import PageReader, ShortRead
from kvtier.tiers.ssd.index import space_mark
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState, padded, record_bytes
from kvtier.tiers.ssd.segment import Segment

__all__ = ["Located", "fetch_run", "locate", "runs_of"]

_RUN_BYTES_MAX = 32 << 20
"""Bytes of one run: the deadline is looked at between runs."""


@dataclass(frozen=True, slots=True)
class Located:
    """A block of a read, and the record it is in."""

    position: int
    wanted: BlockRead
    segment: Segment
    page: int


def locate(
    pool: SegmentPool, blocks: Sequence[BlockRead]
) -> tuple[list[BlockHeader | MissReason], list[Located]]:
    """Find the records of blocks; pins each one's segment. The others are misses already."""
    spaces = np.frombuffer(b"".join(b.key_space + b.tenant for b in blocks), "<u8").reshape(-1, 4)
    marks = space_mark(spaces).tolist()
    results: list[BlockHeader | MissReason] = [MissReason.ABSENT] * len(blocks)
    located: list[Located] = []
    with pool.lock:
        index = pool.index
        rows = index.find([block.block_hash for block in blocks])
        for position in np.flatnonzero(rows >= 0).tolist():
            row, wanted = rows[position], blocks[position]
            if index.space[row] != marks[position]:
                results[position] = MissReason.IDENTITY
            elif index.payload_bytes[row] != wanted.payload_bytes:
                results[position] = MissReason.LENGTH
            else:
                segment = pool.segments[int(index.segment[row])]
                segment.num_pins += 1
                located.append(Located(position, wanted, segment, int(index.page[row])))
    return results, located


def runs_of(located: list[Located]) -> list[list[Located]]:
    """Group records that follow one another in a file, in bounded runs."""
    runs: list[list[Located]] = []
    next_page, run_bytes = -1, 0
    for each in sorted(located, key=lambda each: (each.segment.number, each.page)):
        size_bytes = record_bytes(each.wanted.payload_bytes)
        is_next = bool(runs) and each.segment is runs[-1][0].segment and each.page == next_page
        if is_next and run_bytes + size_bytes <= _RUN_BYTES_MAX:
            runs[-1].append(each)
        else:
            runs.append([each])
            run_bytes = 0
        run_bytes += size_bytes
        next_page = each.page + size_bytes // PAGE_BYTES
    return runs


def fetch_run(
    pool: SegmentPool,
    run: list[Located],
    staging: memoryview,
    results: list[BlockHeader | MissReason],
) -> None:
    """Read a run and judge each of its blocks; damaged ones are forgotten.

    Where the medium fails, the whole run is forgotten before the OSError goes on: a bad sector that
    is asked for again and again would otherwise take the tier down. The records stay on the disk.
    """
    try:
        heads = _read_run(pool, run, staging)
    except (ShortRead, FileNotFoundError):
        if len(run) > 1:
            for each in run:
                fetch_run(pool, [each], staging, results)
            return
        results[run[0].position] = MissReason.LENGTH
        _forget(pool, run)
        return
    except OSError:
        _forget(pool, run)
        raise
    for each, head in zip(run, heads, strict=True):
        results[each.position] = _judge(each, head)
    _forget(pool, [each for each in run if isinstance(results[each.position], MissReason)])


def _read_run(pool: SegmentPool, run: list[Located], staging: memoryview) -> list[bytearray]:
    heads = [bytearray(RECORD_HEAD_BYTES) for _ in run]
    with pool.disk.opened(run[0].segment.path) as fd:
        reader = PageReader(pool.disk, fd, run[0].page * PAGE_BYTES, staging)
        for each, head in zip(run, heads, strict=True):
            reader.add(memoryview(head))
            payload_bytes = each.wanted.payload_bytes
            whole = padded(payload_bytes)
            into = each.wanted.into
            reader.add(into[: whole if len(into) >= whole else payload_bytes])
        reader.flush()
        pool.disk.drop_cache(fd)
    return heads


def _judge(each: Located, packed: bytearray) -> BlockHeader | MissReason:
    head = RecordHead.unpack(bytes(packed), each.segment.number)
    if head is None:
        return MissReason.HEADER
    if head.state is RecordState.REMOVED:
        return MissReason.ABSENT
    header = check_header(each.wanted, head.header)
    if isinstance(header, MissReason):
        return header
    return check_payload(header, each.wanted.into[: each.wanted.payload_bytes])


def _forget(pool: SegmentPool, gone: list[Located]) -> None:
    """Drop blocks from the index, unless they have been stored anew elsewhere meanwhile."""
    with pool.lock:
        index = pool.index
        rows = np.unique(index.find([each.wanted.block_hash for each in gone]))
        places = {(each.segment.number, each.page) for each in gone}
        index.drop(
            np.array(
                [
                    row
                    for row in rows[rows >= 0].tolist()
                    if (int(index.segment[row]), int(index.page[row])) in places
                ],
                dtype=np.int64,
            )
        )
