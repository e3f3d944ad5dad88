"""What an operator's tools call."""

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvtier import __version__
from kvtier.client.wire import tier_from_wire, tier_to_wire
from kvtier.core.identity import Selection
from kvtier.core.residency import TierName
from kvtier.errors import TierError
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.node.scrub import Progress, Scrubber
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["OperatorService"]

_DROP_DEADLINE_MS = 10_000
_DROP_DEADLINE_MS_MAX = 600_000

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """Serves ``kvtier.v1.Operator``; ``stat`` makes the document of ``kvtier stat``.

    ``on_emptied`` is called when the SSD tier was emptied of everything.
    """

    def __init__(
        self,
        driver: Driver,
        stat: Callable[[], dict[str, Any]],
        scrubber: Scrubber | None,
        on_emptied: Callable[[], None],
    ) -> None:
        self._driver = driver
        self._stat = stat
        self._scrubber = scrubber
        self._on_emptied = on_emptied

    async def Ping(self, request: pb.PingRequest, context: _Context) -> pb.PingReply:
        """Say who answers."""
        return pb.PingReply(version=__version__, boot=self._driver.node.boot, pid=os.getpid())

    async def Stat(self, request: pb.StatRequest, context: _Context) -> pb.StatReply:
        """Return the status document."""
        return pb.StatReply(json=json.dumps(self._stat()))

    async def Drop(self, request: pb.DropRequest, context: _Context) -> pb.DropReply:
        """Take a selection of blocks out of tiers."""
        try:
            tiers = tuple(dict.fromkeys(map(tier_from_wire, request.tiers)))
            selection = Selection(request.key_space, request.tenant)
        except KeyError as unknown:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"tier {unknown} is none")
            raise AssertionError("abort raises") from None
        except ValueError as wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
            raise AssertionError("abort raises") from None
        deadline_ms = min(request.deadline_ms or _DROP_DEADLINE_MS, _DROP_DEADLINE_MS_MAX)
        deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
        answer = await self._driver.ask(lambda call: ev.Drop(call, tiers, deadline_ns, selection))
        assert isinstance(answer, tuple)
        is_emptied = any(each.tier is TierName.SSD and not each.error for each in answer)
        if selection.is_all and is_emptied:
            self._on_emptied()
        return pb.DropReply(removed=map(_removed, answer))

    async def Fsck(self, request: pb.FsckRequest, context: _Context) -> AsyncIterator[pb.FsckReply]:
        """Verify the whole SSD tier; loads go first."""
        if self._scrubber is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is no SSD tier here")
            raise AssertionError("abort raises")
        try:
            async with contextlib.aclosing(self._scrubber.whole_pass()) as steps:
                async for progress in steps:
                    yield self._told(progress)
        except TierError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _told(self, progress: Progress) -> pb.FsckReply:
        return pb.FsckReply(
            blocks=progress.num_blocks,
            bytes=progress.num_bytes,
            damaged_blocks=progress.num_damaged,
            expired_blocks=progress.num_expired,
            damaged=progress.damaged if progress.is_over else (),
            blocks_in_all=self._driver.tiers[TierName.SSD].usage().num_blocks,
            over=progress.is_over,
        )


def _removed(dropped: ac.Dropped) -> pb.DropReply.Removed:
    return pb.DropReply.Removed(
        tier=tier_to_wire(dropped.tier),
        blocks=dropped.num_blocks,
        bytes=dropped.num_bytes,
        kept_blocks=dropped.kept_blocks,
        error=dropped.error,
    )
