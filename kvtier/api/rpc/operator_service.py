"""The gRPC service that operators' tools call."""

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvtier import __version__
from kvtier.core.identity import HASH_BYTES, Selection
from kvtier.core.limits import CHAIN_BLOCKS_MAX, GAP_MAX_S
from kvtier.core.tier_registry import STORE_TIER, TierName
from kvtier.errors import StartError, TierError
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.runtime.driver import Driver
from kvtier.runtime.scrubber import ScrubProgress, TierScrubber
from kvtier.tiers.base import Health
from kvtier.v1 import engine_pb2, operator_pb2_grpc
from kvtier.v1 import operator_pb2 as pb
from kvtier.wire.convert import tier_from_wire, tier_to_wire
from kvtier.wire.incoming import tenant_from_wire

__all__ = [
    "ExplainQuestion",
    "OperatorReports",
    "OperatorServicer",
    "TierAdminCalls",
    "change_tier",
]


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """What to explain: a request, a chain, or a request with its chain."""

    request_id: str
    key_space: bytes
    tenant: bytes
    hashes: bytes
    num_tokens: int = 0
    """Tokens of the whole prompt; 0 if unknown."""
    unsalted: bytes = b""
    """Block hashes of the same tokens without the salt or with another one."""


@dataclass(frozen=True, slots=True)
class OperatorReports:
    """Functions that create the documents that commands print with ``--json``."""

    stat: Callable[[], dict[str, Any]]
    explain: Callable[[ExplainQuestion], dict[str, Any] | None]
    """Returns None for an unknown request."""
    benchmark: Callable[[tuple[TierName, ...]], Awaitable[dict[str, Any]]]
    """Benchmarks the given tiers, or all tiers if empty."""
    pause_benchmarks: Callable[[], AbstractAsyncContextManager[None]]
    """A context in which no tier is benchmarked."""
    reload: Callable[[], Awaitable[dict[str, Any]]]
    """Reloads the configuration."""
    config: Callable[[], dict[str, Any]]


_WAIT_MS_MAX = 86_400_000


class TierAdminCalls(Protocol):
    """Changes tiers. Each call waits at most ``wait_s``, and returns whether it is complete.

    Raises StartError if a change is refused.
    """

    async def drain(self, name: TierName, wait_s: float) -> bool:
        """Stop writing to a tier."""

    async def resume(self, name: TierName) -> bool:
        """Resume writing to a drained tier."""

    async def detach(self, name: TierName, wait_s: float, *, is_now: bool = False) -> bool:
        """Close a tier; with ``is_now``, abort its transfers."""

    async def attach(self, name: TierName, wait_s: float) -> bool:
        """Open a detached tier with its current configuration."""

    def health(self, name: TierName) -> Health | None:
        """Return a tier's health and administrative state; None if it is off."""


async def change_tier(
    tier_admin: TierAdminCalls, request: pb.ChangeTierRequest
) -> pb.ChangeTierReply:
    """Carry out a request; a refusal is part of the reply. Raises KeyError for an unknown tier."""
    name, wait_s = tier_from_wire(request.tier), min(request.wait_ms, _WAIT_MS_MAX) / 1000
    try:
        is_done = await _changed(tier_admin, name, request, wait_s)
    except StartError as refusal:
        return pb.ChangeTierReply(
            refusal=pb.ChangeTierReply.Refusal(
                field=refusal.field, problem=refusal.problem, remedy=refusal.remedy
            )
        )
    health = tier_admin.health(name)
    if health is None:
        return pb.ChangeTierReply(done=is_done, state="off")
    return pb.ChangeTierReply(done=is_done, state=health.state.value, reason=health.reason)


async def _changed(
    tier_admin: TierAdminCalls, name: TierName, request: pb.ChangeTierRequest, wait_s: float
) -> bool:
    match request.verb:
        case pb.TIER_VERB_DRAIN:
            return await tier_admin.drain(name, wait_s)
        case pb.TIER_VERB_RESUME:
            return await tier_admin.resume(name)
        case pb.TIER_VERB_DETACH:
            return await tier_admin.detach(name, wait_s, is_now=request.now)
        case pb.TIER_VERB_ATTACH:
            return await tier_admin.attach(name, wait_s)
    raise StartError(name, f"unknown verb {request.verb}", "use the daemon's version of kvtier")


_DEADLINE_MS = 10_000
_DEADLINE_MS_MAX = 600_000

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Serves ``kvtier.v1.Operator`` with documents from ``reports``.

    ``on_emptied`` is called after all blocks of the SSD tier were dropped.
    """

    def __init__(
        self,
        driver: Driver,
        reports: OperatorReports,
        scrubber: TierScrubber,
        on_emptied: Callable[[], None],
        tier_admin: TierAdminCalls,
    ) -> None:
        self._driver = driver
        self._reports = reports
        self._scrubber = scrubber
        self._on_emptied = on_emptied
        self._tier_admin = tier_admin

    async def Ping(self, request: pb.PingRequest, context: _Context) -> pb.PingReply:
        """Return the daemon's version and process id."""
        return pb.PingReply(version=__version__, boot=self._driver.node.boot, pid=os.getpid())

    async def Stat(self, request: pb.StatRequest, context: _Context) -> pb.StatReply:
        """Return the status document."""
        return pb.StatReply(json=json.dumps(self._reports.stat()))

    async def Drop(self, request: pb.DropRequest, context: _Context) -> pb.DropReply:
        """Remove a selection of blocks from tiers."""
        tiers = await _tiers(context, request.tiers)
        try:
            selection = Selection(request.key_space, request.tenant)
        except ValueError as wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
            raise AssertionError("abort raises") from None
        deadline_ns = _deadline_ns(request.deadline_ms)
        async with self._reports.pause_benchmarks():  # else its test blocks would be counted
            answer = await self._driver.ask(
                lambda call: ev.Drop(call, tiers, deadline_ns, selection)
            )
        assert isinstance(answer, tuple)
        is_emptied = any(each.tier is STORE_TIER and not each.error for each in answer)
        if selection.is_all and is_emptied:
            self._on_emptied()
        return pb.DropReply(removed=map(_removed, answer))

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainReply:
        """Return which blocks of a chain or request are cached, and the decision about it."""
        question = ExplainQuestion(
            request.request_id,
            request.key_space,
            tenant_from_wire(request.chain),
            request.chain.hashes,
            request.num_tokens,
            request.unsalted.hashes,
        )
        if question.key_space or question.hashes or not question.request_id:
            await _check_chain(context, question.key_space, question.tenant, question.hashes)
            await _check_chain(context, question.key_space, question.tenant, question.unsalted)
        document = self._reports.explain(question)
        return pb.ExplainReply(json="" if document is None else json.dumps(document))

    async def Pin(self, request: pb.PinRequest, context: _Context) -> pb.PinReply:
        """Pin or unpin a chain's blocks."""
        tenant, hashes = tenant_from_wire(request.chain), request.chain.hashes
        await _check_chain(context, request.key_space, tenant, hashes)
        if request.ttl_s > GAP_MAX_S:
            problem = f"ttl_s is {request.ttl_s}, but must be from 0 to {GAP_MAX_S}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)
        ttl_ns = request.ttl_s * 10**9
        answer = await self._driver.ask(
            lambda call: ev.PinBlocks(call, request.key_space, tenant, hashes, ttl_ns)
        )
        if isinstance(answer, ac.Refused):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, answer.message)
        assert isinstance(answer, ac.PinResult)
        return pb.PinReply(blocks=answer.num_blocks, reason=answer.reason)

    async def Warm(self, request: pb.WarmRequest, context: _Context) -> pb.WarmReply:
        """Promote a chain's blocks to the CPU tier."""
        tenant, hashes = tenant_from_wire(request.chain), request.chain.hashes
        await _check_chain(context, request.key_space, tenant, hashes)
        deadline_ns = _deadline_ns(request.deadline_ms)
        answer = await self._driver.ask(
            lambda call: ev.Warm(call, request.key_space, tenant, hashes, deadline_ns)
        )
        if isinstance(answer, ac.Refused):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, answer.message)
        assert isinstance(answer, ac.WarmResult)
        return pb.WarmReply(
            ready_blocks=answer.num_ready, coming_blocks=answer.num_coming, reason=answer.reason
        )

    async def Probe(self, request: pb.ProbeRequest, context: _Context) -> pb.ProbeReply:
        """Benchmark tiers."""
        tiers = await _tiers(context, request.tiers)
        return pb.ProbeReply(json=json.dumps(await self._reports.benchmark(tiers)))

    async def Reload(self, request: pb.ReloadRequest, context: _Context) -> pb.ReloadReply:
        """Reload the configuration: all of it or nothing."""
        return pb.ReloadReply(json=json.dumps(await self._reports.reload()))

    async def Config(self, request: pb.ConfigRequest, context: _Context) -> pb.ConfigReply:
        """Return the effective configuration."""
        return pb.ConfigReply(json=json.dumps(self._reports.config()))

    async def Fsck(self, request: pb.FsckRequest, context: _Context) -> AsyncIterator[pb.FsckReply]:
        """Verify the whole SSD tier with lower priority than loads."""
        if STORE_TIER not in self._driver.tiers:
            problem = "the daemon has no SSD tier; check a detached one without the daemon"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        try:
            async with contextlib.aclosing(self._scrubber.whole_pass()) as steps:
                async for progress in steps:
                    yield self._fsck_reply(progress)
        except TierError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def ChangeTier(
        self, request: pb.ChangeTierRequest, context: _Context
    ) -> pb.ChangeTierReply:
        """Drain, detach or attach a tier; a refusal is part of the reply."""
        await _tiers(context, [request.tier])
        return await change_tier(self._tier_admin, request)

    def _fsck_reply(self, progress: ScrubProgress) -> pb.FsckReply:
        tier = self._driver.tiers.get(STORE_TIER)
        return pb.FsckReply(
            blocks=progress.num_blocks,
            bytes=progress.num_bytes,
            damaged_blocks=progress.num_damaged,
            expired_blocks=progress.num_expired,
            damaged=progress.damaged if progress.is_over else (),
            blocks_in_all=tier.usage().num_blocks if tier else 0,
            over=progress.is_over,
        )


def _deadline_ns(deadline_ms: int) -> int:
    return time.monotonic_ns() + min(deadline_ms or _DEADLINE_MS, _DEADLINE_MS_MAX) * 1_000_000


async def _tiers(
    context: _Context, numbers: Iterable["engine_pb2.Tier.ValueType"]
) -> tuple[TierName, ...]:
    """Return the tiers in a call without duplicates."""
    try:
        return tuple(dict.fromkeys(map(tier_from_wire, numbers)))
    except KeyError as unknown:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unknown tier {unknown}")
        raise AssertionError("abort raises") from None


async def _check_chain(context: _Context, key_space: bytes, tenant: bytes, hashes: bytes) -> None:
    """Refuse a call with an invalid chain."""
    problem = ""
    if len(key_space) != HASH_BYTES:
        problem = f"key_space must have {HASH_BYTES} bytes, not {len(key_space)}"
    elif len(tenant) != HASH_BYTES or len(hashes) % HASH_BYTES:
        problem = f"tenant must have {HASH_BYTES} bytes, and hashes a multiple of that"
    elif len(hashes) > CHAIN_BLOCKS_MAX * HASH_BYTES:
        problem = (
            f"the chain has {len(hashes) // HASH_BYTES} blocks, the maximum is {CHAIN_BLOCKS_MAX}"
        )
    if problem:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, problem)


def _removed(dropped: ac.TierDropped) -> pb.DropReply.Removed:
    return pb.DropReply.Removed(
        tier=tier_to_wire(dropped.tier),
        blocks=dropped.num_blocks,
        bytes=dropped.num_bytes,
        kept_blocks=dropped.kept_blocks,
        error=dropped.error,
        keeping=[
            pb.DropReply.Keeping(engine=each.engine, pid=each.pid, why=each.why)
            for each in dropped.keeping
        ],
    )
