"""What is said to one server: blocks written, read, asked for, and whether it would take one."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from kvtier.core.identity import BlockHash, BlockHeader
from kvtier.errors import TierError, TierFull
from kvtier.tiers.base import BlockRead, BlockWrite, MissReason, WriteOutcome
from kvtier.tiers.redis.connection import OnReply
from kvtier.tiers.redis.resp import ErrorReply, Reply, RespCommand
from kvtier.tiers.redis.server import MEMORY, Server, free_bytes
from kvtier.tiers.redis.unlink import unlink_keys
from kvtier.tiers.redis.value import HEAD_BYTES, PARTS_MAX, ReadOutcome, ValueFormat

__all__ = ["FanOut", "ServerBatch"]


_SPARE_FACTOR = 4
"""Memory that must be free per byte of a measurement, because others write at the same time."""

_GROUP_BYTES = 8 << 20
"""Payload that is sealed and sent at once, which limits the buffers of a connection."""


class ServerBatch:
    """The traffic with one server in one call of the tier. Every method raises TierError."""

    def __init__(self, server: Server, values: ValueFormat, now_s: float, deadline_ns: int) -> None:
        self.server = server
        self.has_moved = False
        """Whether another server has some of the blocks now."""
        self._values = values
        self._now_s = now_s
        self._deadline_ns = deadline_ns

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Tell for each hash whether its head is there; None if the server refuses to answer."""
        replies = self._ask([RespCommand((b"EXISTS", self._values.key(each))) for each in hashes])
        return [None if isinstance(reply, ErrorReply) else reply == 1 for reply in replies]

    def write(self, blocks: Sequence[BlockWrite]) -> list[WriteOutcome]:
        """Set the blocks that are not there, and renew the others."""
        if self.server.limit and blocks:
            self.check(blocks[0].header.block_hash)
        return [outcome for group in _groups(blocks) for outcome in self._write_group(group)]

    def read(self, blocks: Sequence[BlockRead]) -> list[BlockHeader | MissReason]:
        """Fetch blocks; values that serve nobody any more are unlinked."""
        verdicts = self._fetch(blocks, self._values.value_bytes)
        for index, verdict in enumerate(verdicts):
            if verdict.split_bytes:
                (verdicts[index],) = self._fetch([blocks[index]], verdict.split_bytes)
        for wanted, verdict in zip(blocks, verdicts, strict=True):
            if verdict.is_over:
                with contextlib.suppress(TierError):  # it is a miss all the same
                    self._unlink(wanted.block_hash, wanted.payload_bytes)
        return [verdict.result for verdict in verdicts]

    def check(self, block_hash: BlockHash) -> None:
        """Ask whether it would take a block of its slots; ``fault`` and ``limit`` tell.

        XX sets nothing, because nobody sets that key; a server that is full or a replica refuses
        all the same, and a block need not be sent to find that out.
        """
        key = self._values.key(block_hash) + b":probe"
        self._ask([RespCommand((b"PING",)), RespCommand((b"SET", key, b"", b"XX"))])

    def check_room(self, num_bytes: int) -> None:
        """Raise TierFull unless the server can surely store that many bytes without evicting."""
        (memory,) = self._ask([MEMORY])
        free = free_bytes(memory)
        if free is None:
            raise TierFull(f"{self.server.place} does not report how much memory is free")
        if free < _SPARE_FACTOR * num_bytes:
            needed = f"{_SPARE_FACTOR * num_bytes >> 10} KiB"
            raise TierFull(f"{self.server.place} has less than {needed} of memory free")

    def _write_group(self, blocks: Sequence[BlockWrite]) -> list[WriteOutcome]:
        present = self._renew(blocks)
        absent = [block for block, is_there in zip(blocks, present, strict=True) if not is_there]
        if self.server.limit:
            stored = {block.header.block_hash: False for block in absent}
        else:
            stored = self._set(absent)
        return [
            WriteOutcome.STORED
            if is_there or stored[block.header.block_hash]
            else WriteOutcome.REJECTED
            for block, is_there in zip(blocks, present, strict=True)
        ]

    def _renew(self, blocks: Sequence[BlockWrite]) -> list[bool]:
        asked = [self._values.renewals(block.header) for block in blocks]
        replies = self._answers(asked)
        return [
            self._values.is_renewed(block.header, answer, self._now_s)
            for block, answer in zip(blocks, replies, strict=True)
        ]

    def _set(self, blocks: Sequence[BlockWrite]) -> dict[BlockHash, bool]:
        """Set blocks; one that is refused leaves no trace."""
        once = {block.header.block_hash: block for block in blocks}
        needs_buffer = self._values.seal.needs_buffer
        size_bytes = sum(len(block.payload) for block in once.values()) if needs_buffer else 0
        buffer = memoryview(bytearray(size_bytes))
        asked: list[list[RespCommand]] = []
        for block in once.values():
            own, buffer = buffer[: len(block.payload)], buffer[len(block.payload) :]
            into = own if needs_buffer else None
            asked.append(self._values.sets(block, int(self._now_s), into))
        stored: dict[BlockHash, bool] = {}
        for block, answer in zip(once.values(), self._answers(asked), strict=True):
            stored[block.header.block_hash] = all(reply == b"OK" for reply in answer)
            if b"OK" in answer and not stored[block.header.block_hash]:
                with contextlib.suppress(TierError):  # what is left of it expires
                    self._unlink(block.header.block_hash, len(block.payload))
        return stored

    def _fetch(self, blocks: Sequence[BlockRead], split_bytes: int) -> list[ReadOutcome]:
        heads = memoryview(bytearray(HEAD_BYTES * len(blocks)))
        own = [heads[start : start + HEAD_BYTES] for start in range(0, len(heads), HEAD_BYTES)]
        asked = [
            self._values.gets(wanted, head, split_bytes)
            for wanted, head in zip(blocks, own, strict=True)
        ]
        verdicts: list[ReadOutcome] = []
        answer: list[Reply] = []

        def note(reply: Reply) -> None:
            """Judge a block while it is in the processor's cache and the next is on its way."""
            answer.append(reply)
            index = len(verdicts)
            if len(answer) == len(asked[index]):
                block = self._values.judge(
                    blocks[index], own[index], answer, split_bytes, self._now_s
                )
                verdicts.append(block)
                answer.clear()

        self._ask([command for question in asked for command in question], note)
        return verdicts

    def _unlink(self, block_hash: BlockHash, payload_bytes: int) -> None:
        num_parts = min(PARTS_MAX, self._values.num_parts(payload_bytes))
        keys = [self._values.key(block_hash, part) for part in range(num_parts)]
        unlink_keys(self.server, keys, self._deadline_ns)

    def _answers(self, asked: Sequence[Sequence[RespCommand]]) -> Iterator[list[Reply]]:
        """Ask several questions at once; yields the replies to each."""
        replies = iter(self._ask([command for question in asked for command in question]))
        for question in asked:
            yield [next(replies) for _ in question]

    def _ask(self, commands: Sequence[RespCommand], note: OnReply | None = None) -> list[Reply]:
        replies = self.server.ask(commands, self._deadline_ns, note) if commands else []
        self.has_moved |= any(isinstance(r, ErrorReply) and r.is_elsewhere for r in replies)
        return replies


def _groups(blocks: Sequence[BlockWrite]) -> Iterator[Sequence[BlockWrite]]:
    """Cut a batch by payload; each group has a block at least."""
    group: list[BlockWrite] = []
    group_bytes = 0
    for block in blocks:
        if group and group_bytes + len(block.payload) > _GROUP_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(block)
        group_bytes += len(block.payload)
    if group:
        yield group


T = TypeVar("T")


class FanOut:
    """Does them on up to ``num_threads`` threads; from any thread."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "remote-part")

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T | TierError]:
        """Return what the steps return, or the TierErrors they raise; one alone needs no thread.

        None is under way any more, nor will be, when this returns or raises: they touch the memory
        of their caller. Each has to end by itself. Raises TierError where one could not begin.
        """
        if len(steps) < 2:
            return [_attempt(step) for step in steps]
        parts: list[Future[T | TierError]] = [Future() for _ in steps]
        try:
            for part, step in zip(parts, steps, strict=True):
                self._threads.submit(_do, part, step)
        except RuntimeError as error:  # no thread is to be had, or this is closed
            # The pool may have taken in what it found no thread for, and come to it later.
            wait([part for part in parts if not part.cancel()])
            raise TierError(f"remote: cannot query all servers: {error}") from None
        wait(parts)
        return [part.result() for part in parts]

    def close(self) -> None:
        """Begin nothing more; waits for nobody."""
        self._threads.shutdown(wait=False)


def _do(part: "Future[T | TierError]", step: Callable[[], T]) -> None:
    if not part.set_running_or_notify_cancel():
        return  # its call is over
    try:
        part.set_result(_attempt(step))
    except BaseException as error:  # the caller's, whatever it is
        part.set_exception(error)


def _attempt(step: Callable[[], T]) -> T | TierError:
    try:
        return step()
    except TierError as error:
        return error
