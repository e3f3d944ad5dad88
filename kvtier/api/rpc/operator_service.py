"""What an operator's tools call."""

import json
import os
import time
from collections.abc import Callable
from typing import Any

import grpc

from kvtier import __version__
from kvtier.client.wire import tier_from_wire, tier_to_wire
from kvtier.node import action as ac
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.v1 import operator_pb2 as pb
from kvtier.v1 import operator_pb2_grpc

__all__ = ["OperatorService"]

_DROP_DEADLINE_MS = 10_000
_DROP_DEADLINE_MS_MAX = 600_000

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """Serves ``kvtier.v1.Operator``; ``stat`` makes the document of ``kvtier stat``."""

    def __init__(self, driver: Driver, stat: Callable[[], dict[str, Any]]) -> None:
        self._driver = driver
        self._stat = stat

    async def Ping(self, request: pb.PingRequest, context: _Context) -> pb.PingReply:
        """Say who answers."""
        return pb.PingReply(version=__version__, boot=self._driver.node.boot, pid=os.getpid())

    async def Stat(self, request: pb.StatRequest, context: _Context) -> pb.StatReply:
        """Return the status document."""
        return pb.StatReply(json=json.dumps(self._stat()))

    async def Drop(self, request: pb.DropRequest, context: _Context) -> pb.DropReply:
        """Empty tiers."""
        try:
            tiers = tuple(dict.fromkeys(map(tier_from_wire, request.tiers)))
        except KeyError as unknown:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"tier {unknown} is none")
            raise AssertionError("abort raises") from None
        deadline_ms = min(request.deadline_ms or _DROP_DEADLINE_MS, _DROP_DEADLINE_MS_MAX)
        deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
        answer = await self._driver.ask(lambda call: ev.Drop(call, tiers, deadline_ns))
        assert isinstance(answer, tuple)
        return pb.DropReply(removed=map(_removed, answer))


def _removed(dropped: ac.Dropped) -> pb.DropReply.Removed:
    return pb.DropReply.Removed(
        tier=tier_to_wire(dropped.tier),
        blocks=dropped.num_blocks,
        bytes=dropped.num_bytes,
        kept_blocks=dropped.kept_blocks,
        error=dropped.error,
    )
