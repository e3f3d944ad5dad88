"""Reads blocks: locates them, reads neighbours together, and verifies every block.

A block that fails verification is read once more alone, since the fault may be in the transfer. If
it fails again it is forgotten and quarantined. If the device fails, the blocks are forgotten, but
their records are not quarantined, since they may be readable later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.identity import BlockHeader
from kvtier.core.limits import PAGE_BYTES
from kvtier.tiers.base import BlockRead, MissReason
from kvtier.tiers.check import check_header
from kvtier.tiers.seal import Seal
from kvtier.tiers.ssd.damage import Quarantine
from kvtier.tiers.ssd.disk import PageReader, ShortRead
from kvtier.tiers.ssd.index import space_mark
from kvtier.tiers.ssd.pool import SegmentPool
from kvtier.tiers.ssd.record import RECORD_HEAD_BYTES, RecordHead, RecordState, padded, record_bytes
from kvtier.tiers.ssd.segment import Segment

__all__ = ["Fetcher", "Located", "forget", "locate", "runs_of"]

_RUN_BYTES_MAX = 32 << 20
"""Maximum size of a run; the deadline is checked between runs."""


@dataclass(frozen=True, slots=True)
class Located:
    """A block to read and the record that holds it."""

    position: int
    wanted: BlockRead
    segment: Segment
    page: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Result of reading a record, and whether the record itself is damaged."""

    result: BlockHeader | MissReason
    is_damage: bool = False


_Results = list[BlockHeader | MissReason]


def locate(
    pool: SegmentPool, blocks: Sequence[BlockRead], oldest_s: int
) -> tuple[_Results, list[Located]]:
    """Find and pin the segments of blocks. The result of other blocks is already a miss.

    Blocks written before ``oldest_s`` are forgotten.
    """
    spaces = np.frombuffer(b"".join(b.key_space + b.tenant for b in blocks), "<u8").reshape(-1, 4)
    marks = space_mark(spaces).tolist()
    results: _Results = [MissReason.ABSENT] * len(blocks)
    located: list[Located] = []
    expired: set[int] = set()
    with pool.lock:
        index = pool.index
        rows = index.find([block.block_hash for block in blocks])
        for position in np.flatnonzero(rows >= 0).tolist():
            row, wanted = int(rows[position]), blocks[position]
            if index.space[row] != marks[position]:
                results[position] = MissReason.IDENTITY
            elif index.payload_bytes[row] != wanted.payload_bytes:
                results[position] = MissReason.LENGTH
            elif index.written_s[row] < oldest_s:
                results[position] = MissReason.EXPIRED
                expired.add(row)
            else:
                segment = pool.segments[int(index.segment[row])]
                segment.num_pins += 1
                located.append(Located(position, wanted, segment, int(index.page[row])))
        index.touch(rows[np.array([each.position for each in located], dtype=np.int64)])
        index.drop(np.array(sorted(expired), dtype=np.int64))
    return results, located


def runs_of(located: list[Located]) -> list[list[Located]]:
    """Group records that are contiguous in a file into bounded runs."""
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


class Fetcher:
    """Reads and verifies runs of records. Any number of calls may run at once."""

    def __init__(self, pool: SegmentPool, seal: Seal, quarantine: Quarantine) -> None:
        self._pool = pool
        self._seal = seal
        self._quarantine = quarantine

    def fetch(self, run: list[Located], staging: memoryview, results: _Results) -> None:
        """Read a run and store each block's result.

        If the device fails, the whole run is forgotten before the OSError propagates: repeated
        requests for a bad sector would otherwise take the tier down.
        """
        try:
            verdicts = self._read(run, staging)
            for place, verdict in enumerate(verdicts):
                if verdict.is_damage:
                    verdicts[place] = self._read([run[place]], staging)[0]
        except (ShortRead, FileNotFoundError):
            if len(run) > 1:
                for each in run:
                    self.fetch([each], staging, results)
                return
            verdicts = [_Verdict(MissReason.LENGTH)]
        except OSError:
            forget(self._pool, run)
            raise
        missed, damaged = [], []
        for each, verdict in zip(run, verdicts, strict=True):
            results[each.position] = verdict.result
            if verdict.is_damage:
                damaged.append(each)
            elif verdict.result in _GONE:
                missed.append(each)
        forget(self._pool, missed)
        found = forget(self._pool, damaged)
        for each in found:
            self._quarantine.add(each.segment, [each.page])
        names = {each.wanted.block_hash for each in found}
        for each in damaged:
            if each.wanted.block_hash not in names:  # removed or moved during the read
                results[each.position] = MissReason.ABSENT

    def _read(self, run: list[Located], staging: memoryview) -> list[_Verdict]:
        pool = self._pool
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
        return [self._judge(each, bytes(head)) for each, head in zip(run, heads, strict=True)]

    def _judge(self, each: Located, packed: bytes) -> _Verdict:
        head = RecordHead.unpack(packed, each.segment.number)
        if head is None:
            return _Verdict(MissReason.HEADER, is_damage=True)
        if head.state is not RecordState.LIVE:
            return _Verdict(MissReason.ABSENT)
        wanted = each.wanted
        header = check_header(wanted, head.header)
        if isinstance(header, MissReason):
            # With the wanted hash it is a sound block of another identity; else it is damaged.
            found = BlockHeader.unpack(head.header) if header is MissReason.IDENTITY else None
            is_owned = found is not None and found.block_hash == wanted.block_hash
            return _Verdict(header, is_damage=not is_owned)
        result = self._seal.open(header, head.stamp, wanted.into[: wanted.payload_bytes])
        return _Verdict(result, is_damage=self._is_damage(result, head))

    def _is_damage(self, result: BlockHeader | MissReason, head: RecordHead) -> bool:
        """Return whether a block is damaged, and not just sealed with a missing key."""
        if result is MissReason.SEAL:
            return self._seal.may_open(head.stamp)
        return isinstance(result, MissReason)


_GONE = frozenset({MissReason.ABSENT, MissReason.LENGTH, MissReason.SEAL})
"""Misses after which a block is forgotten although its record is not known to be damaged."""


def forget(pool: SegmentPool, gone: Iterable[Located]) -> list[Located]:
    """Drop blocks from the index and return them, except those that have moved meanwhile."""
    unique = list({each.wanted.block_hash: each for each in gone}.values())
    with pool.lock:
        index = pool.index
        rows = index.find([each.wanted.block_hash for each in unique])
        is_there = np.array(
            [
                row >= 0
                and index.segment[row] == each.segment.number
                and index.page[row] == each.page
                for row, each in zip(rows.tolist(), unique, strict=True)
            ],
            dtype=bool,
        )
        index.drop(rows[is_there])
    return [each for each, there in zip(unique, is_there.tolist(), strict=True) if there]
