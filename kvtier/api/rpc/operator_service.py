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
from kvtier.core.residency import TierName
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
    """What is to be explained: a request, a chain, or a request together with its chain."""

    request_id: str
    key_space: bytes
    tenant: bytes
    hashes: bytes
    num_tokens: int = 0
    """Of the whole prompt; 0: unknown."""
    unsalted: bytes = b""
    """The same tokens' block hashes without the salt, or under another one."""


@dataclass(frozen=True, slots=True)
class OperatorReports:
    """Each makes one of the stable documents that a command prints with ``--json``."""

    stat: Callable[[], dict[str, Any]]
    explain: Callable[[ExplainQuestion], dict[str, Any] | None]
    """None: the request is not known."""
    probe: Callable[[tuple[TierName, ...]], Awaitable[dict[str, Any]]]
    """Measures these tiers; none given: all there are."""
    hold_probe: Callable[[], AbstractAsyncContextManager[None]]
    """While it is open nothing is measured."""
    reload: Callable[[], Awaitable[dict[str, Any]]]
    """Reads the configuration again, and applies it."""
    config: Callable[[], dict[str, Any]]


_WAIT_MS_MAX = 86_400_000


class TierAdminCalls(Protocol):
    """Each verb waits at most so long, and tells whether all is done. Raises StartError."""

    async def drain(self, name: TierName, wait_s: float) -> bool:
        """Write nothing new to a tier."""

    async def resume(self, name: TierName) -> bool:
        """Use a drained tier as before."""

    async def detach(self, name: TierName, wait_s: float, *, is_now: bool = False) -> bool:
        """Take a tier off."""

    async def attach(self, name: TierName, wait_s: float) -> bool:
        """Use a tier as it is configured now."""

    def health(self, name: TierName) -> Health | None:
        """Return how a tier does, or what was made of it; None: it is off."""


async def change_tier(
    tier_admin: TierAdminCalls, request: pb.ChangeTierRequest
) -> pb.ChangeTierReply:
    """Do as a request says; a refusal is part of the reply. Raises KeyError for no tier."""
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
    raise StartError(name, f"verb {request.verb} is none", "use this version's kvtier")


_DEADLINE_MS = 10_000
_DEADLINE_MS_MAX = 600_000

_Context = grpc.aio.ServicerContext[Any, Any]


class OperatorServicer(operator_pb2_grpc.OperatorServicer):
    """Serves ``kvtier.v1.Operator``; ``reports`` makes what it tells.

    ``on_emptied`` is called when the SSD tier was emptied of everything.
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
        """Say who answers."""
        return pb.PingReply(version=__version__, boot=self._driver.node.boot, pid=os.getpid())

    async def Stat(self, request: pb.StatRequest, context: _Context) -> pb.StatReply:
        """Return the status document."""
        return pb.StatReply(json=json.dumps(self._reports.stat()))

    async def Drop(self, request: pb.DropRequest, context: _Context) -> pb.DropReply:
        """Take a selection of blocks out of tiers."""
        tiers = await _tiers(context, request.tiers)
        try:
            selection = Selection(request.key_space, request.tenant)
        except ValueError as wrong:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
            raise AssertionError("abort raises") from None
        deadline_ns = _deadline_ns(request.deadline_ms)
        async with self._reports.hold_probe():  # else what it measures with would be counted
            answer = await self._driver.ask(
                lambda call: ev.Drop(call, tiers, deadline_ns, selection)
            )
        assert isinstance(answer, tuple)
        is_emptied = any(each.tier is TierName.SSD and not each.error for each in answer)
        if selection.is_all and is_emptied:
            self._on_emptied()
        return pb.DropReply(removed=map(_removed, answer))

    async def Explain(self, request: pb.ExplainRequest, context: _Context) -> pb.ExplainReply:
        """Return what is cached of a chain or a request, and what was decided about it."""
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
        """Keep a chain's blocks, or let them go again."""
        tenant, hashes = tenant_from_wire(request.chain), request.chain.hashes
        await _check_chain(context, request.key_space, tenant, hashes)
        if request.ttl_s > GAP_MAX_S:
            said = f"ttl_s is {request.ttl_s}; it goes from 0 to {GAP_MAX_S}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)
        ttl_ns = request.ttl_s * 10**9
        answer = await self._driver.ask(
            lambda call: ev.PinBlocks(call, request.key_space, tenant, hashes, ttl_ns)
        )
        if isinstance(answer, ac.Refused):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, answer.message)
        assert isinstance(answer, ac.PinResult)
        return pb.PinReply(blocks=answer.num_blocks, reason=answer.reason)

    async def Warm(self, request: pb.WarmRequest, context: _Context) -> pb.WarmReply:
        """Bring a chain's blocks into the CPU tier."""
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
        """Measure what transfers of tiers take, now."""
        tiers = await _tiers(context, request.tiers)
        return pb.ProbeReply(json=json.dumps(await self._reports.probe(tiers)))

    async def Reload(self, request: pb.ReloadRequest, context: _Context) -> pb.ReloadReply:
        """Read the configuration again, and apply all of it or nothing."""
        return pb.ReloadReply(json=json.dumps(await self._reports.reload()))

    async def Config(self, request: pb.ConfigRequest, context: _Context) -> pb.ConfigReply:
        """Return the configuration that holds."""
        return pb.ConfigReply(json=json.dumps(self._reports.config()))

    async def Fsck(self, request: pb.FsckRequest, context: _Context) -> AsyncIterator[pb.FsckReply]:
        """Verify the whole SSD tier; loads go first."""
        if TierName.SSD not in self._driver.tiers:
            said = "there is no SSD tier here; one that is detached can be checked without a daemon"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, said)
        try:
            async with contextlib.aclosing(self._scrubber.whole_pass()) as steps:
                async for progress in steps:
                    yield self._told(progress)
        except TierError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def ChangeTier(
        self, request: pb.ChangeTierRequest, context: _Context
    ) -> pb.ChangeTierReply:
        """Drain, detach or attach a tier; what was refused is told in the reply."""
        await _tiers(context, [request.tier])
        return await change_tier(self._tier_admin, request)

    def _told(self, progress: ScrubProgress) -> pb.FsckReply:
        tier = self._driver.tiers.get(TierName.SSD)
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
    """Return the tiers that a call names, each once."""
    try:
        return tuple(dict.fromkeys(map(tier_from_wire, numbers)))
    except KeyError as unknown:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"tier {unknown} is none")
        raise AssertionError("abort raises") from None


async def _check_chain(context: _Context, key_space: bytes, tenant: bytes, hashes: bytes) -> None:
    """Refuse a call that names no chain."""
    said = ""
    if len(key_space) != HASH_BYTES:
        said = f"key_space has {len(key_space)} bytes, not {HASH_BYTES}"
    elif len(tenant) != HASH_BYTES or len(hashes) % HASH_BYTES:
        said = f"hashes and the tenant come in pieces of {HASH_BYTES} bytes"
    elif len(hashes) > CHAIN_BLOCKS_MAX * HASH_BYTES:
        said = f"a chain has {len(hashes) // HASH_BYTES} blocks; {CHAIN_BLOCKS_MAX} is the most"
    if said:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, said)


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
