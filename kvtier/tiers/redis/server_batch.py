"""The traffic with Redis servers in one call of the tier: a batch per server, all in parallel."""

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
"""Free memory required per byte of a benchmark, because others write at the same time."""

_GROUP_BYTES = 8 << 20
"""Payload sealed and sent at once, which limits the buffers of a connection."""


class ServerBatch:
    """The part of one call that concerns one server. Methods raise TierError on failure."""

    def __init__(self, server: Server, values: ValueFormat, now_s: float, deadline_ns: int) -> None:
        self.server = server
        self.has_moved = False
        """Another server has some of the blocks now."""
        self._values = values
        self._now_s = now_s
        self._deadline_ns = deadline_ns

    def contains(self, hashes: Sequence[BlockHash]) -> list[bool | None]:
        """Return for each hash whether its head exists; None if the server refuses to answer."""
        replies = self._ask([RespCommand((b"EXISTS", self._values.key(each))) for each in hashes])
        return [None if isinstance(reply, ErrorReply) else reply == 1 for reply in replies]

    def write(self, blocks: Sequence[BlockWrite]) -> list[WriteOutcome]:
        """Set absent blocks and renew the others."""
        if self.server.limit and blocks:
            self.check(blocks[0].header.block_hash)
        return [outcome for group in _groups(blocks) for outcome in self._write_group(group)]

    def read(self, blocks: Sequence[BlockRead]) -> list[BlockHeader | MissReason]:
        """Read blocks; values that are no longer usable are unlinked."""
        verdicts = self._fetch(blocks, self._values.value_bytes)
        for index, verdict in enumerate(verdicts):
            if verdict.split_bytes:
                (verdicts[index],) = self._fetch([blocks[index]], verdict.split_bytes)
        for wanted, verdict in zip(blocks, verdicts, strict=True):
            if verdict.is_obsolete:
                with contextlib.suppress(TierError):  # still a miss
                    self._unlink(wanted.block_hash, wanted.payload_bytes)
        return [verdict.result for verdict in verdicts]

    def check(self, block_hash: BlockHash) -> None:
        """Test whether the server would accept a block; updates its ``fault`` and ``limit``.

        With XX nothing is set, because the key never exists; a full server or a replica still
        rejects the command, so no block has to be sent to find out.
        """
        key = self._values.key(block_hash) + b":probe"
        self._ask([RespCommand((b"PING",)), RespCommand((b"SET", key, b"", b"XX"))])

    def check_room(self, num_bytes: int) -> None:
        """Raise TierFull unless the server can store that many bytes without evicting."""
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
        """Set blocks; a rejected one leaves no trace."""
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
                with contextlib.suppress(TierError):  # leftover values expire
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

        def on_reply(reply: Reply) -> None:
            """Verify a block while it is in the processor's cache and the next one is in flight."""
            answer.append(reply)
            index = len(verdicts)
            if len(answer) == len(asked[index]):
                block = self._values.read_outcome(
                    blocks[index], own[index], answer, split_bytes, self._now_s
                )
                verdicts.append(block)
                answer.clear()

        self._ask([command for question in asked for command in question], on_reply)
        return verdicts

    def _unlink(self, block_hash: BlockHash, payload_bytes: int) -> None:
        num_parts = min(PARTS_MAX, self._values.num_parts(payload_bytes))
        keys = [self._values.key(block_hash, part) for part in range(num_parts)]
        unlink_keys(self.server, keys, self._deadline_ns)

    def _answers(self, asked: Sequence[Sequence[RespCommand]]) -> Iterator[list[Reply]]:
        """Send several groups of commands at once; yield the replies to each group."""
        replies = iter(self._ask([command for question in asked for command in question]))
        for question in asked:
            yield [next(replies) for _ in question]

    def _ask(self, commands: Sequence[RespCommand], on_reply: OnReply | None = None) -> list[Reply]:
        replies = self.server.ask(commands, self._deadline_ns, on_reply) if commands else []
        self.has_moved |= any(isinstance(r, ErrorReply) and r.is_elsewhere for r in replies)
        return replies


def _groups(blocks: Sequence[BlockWrite]) -> Iterator[Sequence[BlockWrite]]:
    """Split a batch by payload size; each group has at least one block."""
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
    """Calls several servers in parallel on up to ``num_threads`` threads. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "remote-part")

    def run(self, steps: Sequence[Callable[[], T]]) -> list[T | TierError]:
        """Return the results of the steps or their TierErrors; a single step needs no thread.

        When this returns or raises, no step is running or will run, since they touch the caller's
        memory. Each step must end by itself. Raises TierError if one could not start.
        """
        if len(steps) < 2:
            return [_attempt(step) for step in steps]
        parts: list[Future[T | TierError]] = [Future() for _ in steps]
        try:
            for part, step in zip(parts, steps, strict=True):
                self._threads.submit(_do, part, step)
        except RuntimeError as error:  # no thread could start, or this is closed
            # The pool may have queued a step without a thread and run it later.
            wait([part for part in parts if not part.cancel()])
            raise TierError(f"remote: cannot query all servers: {error}") from None
        wait(parts)
        return [part.result() for part in parts]

    def close(self) -> None:
        """Start nothing more; does not wait."""
        self._threads.shutdown(wait=False)


def _do(part: "Future[T | TierError]", step: Callable[[], T]) -> None:
    if not part.set_running_or_notify_cancel():
        return  # its call has ended
    try:
        part.set_result(_attempt(step))
    except BaseException as error:  # raised in the caller
        part.set_exception(error)


def _attempt(step: Callable[[], T]) -> T | TierError:
    try:
        return step()
    except TierError as error:
        return error
