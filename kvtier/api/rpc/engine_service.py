"""The gRPC service for engines: converts messages to events of the node, and answers to replies."""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import grpc

from kvtier.core.identity import HASH_BYTES, Selection, split_hashes
from kvtier.core.limits import ANNOUNCED_MAX, EMPTY_MS
from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.observe.daemon_metrics import LOOKUP_SECONDS
from kvtier.observe.trace import TRACES, TraceStep
from kvtier.runtime.driver import Driver
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import ArenaServer
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from kvtier.wire.convert import (
    agreed_protocol,
    change_to_wire,
    plan_to_wire,
    purpose_from_wire,
    tier_to_wire,
)
from kvtier.wire.incoming import (
    check_length,
    ended_ids_from_wire,
    flops_from_wire,
    layout_from_wire,
    load_from_wire,
    outcomes_from_wire,
    steps_from_wire,
    traits_from_wire,
)

__all__ = ["EngineServicer"]

_STATUS: Mapping[str, grpc.StatusCode] = {
    "registration": grpc.StatusCode.FAILED_PRECONDITION,
    "session": grpc.StatusCode.UNAUTHENTICATED,
    "chain": grpc.StatusCode.INVALID_ARGUMENT,
    "field": grpc.StatusCode.INVALID_ARGUMENT,
    "too_many": grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_DEADLINE_MS_MAX = 600_000

_REFUSAL_MAX = 200
"""Maximum length of an engine's reason, which is shown to the operator."""

_Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Serves ``kvtier.v1.Engine`` from a node's driver."""

    def __init__(self, driver: Driver, arena: ArenaServer) -> None:
        self._driver = driver
        self._arena = arena

    async def Register(self, request: pb.RegisterRequest, context: _Context) -> pb.RegisterReply:
        """Check protocol and proof, then open a session."""
        try:
            protocol = agreed_protocol(request.protocol, request.oldest_protocol)
        except ValueError as error:
            await _refuse(context, "registration", str(error))
        if not self._arena.proves(request.ticket.decode("ascii", "replace"), request.proof):
            await _refuse(
                context,
                "registration",
                "the client cannot access the daemon's shared memory (wrong proof); "
                "mount the daemon's socket directory in the engine's container",
            )
        try:
            layout = layout_from_wire(request.layout)
            flops = flops_from_wire(request.flops)
        except ValueError as error:
            await _refuse(context, "registration", str(error))
        ticket = request.ticket.decode("ascii")
        answer = await self._ask(
            context,
            lambda call: ev.Register(
                call=call,
                ticket=ticket,
                key_space=request.key_space,
                layout=layout,
                engine=request.engine[:200],
                transport="shm",
                pid=self._arena.pid_of(ticket),
                flops=flops,
                can_split=request.can_split,
                rank=request.rank,
            ),
        )
        assert isinstance(answer, ac.Registration)
        self._arena.keep(ticket)
        return pb.RegisterReply(
            session=answer.session,
            boot=answer.boot,
            lease_ms=answer.lease_ns // 1_000_000,
            protocol=protocol,
        )

    async def Attend(self, request: pb.AttendRequest, context: _Context) -> AsyncIterator[pb.Order]:
        """Stream orders to the client until it disconnects."""
        if request.session not in self._driver.node.sessions:
            await _refuse(context, "session", "register first")
        async for order in self._driver.orders(request.session):
            yield pb.Order(order=order, drop=pb.Order.Drop())

    async def Report(self, request: pb.ReportRequest, context: _Context) -> pb.ReportReply:
        """Record the contents of the engine's own tier, and its measurements."""
        steps, outcomes, load = await _read(
            context,
            lambda: (
                steps_from_wire(request.steps),
                outcomes_from_wire(request.outcomes),
                load_from_wire(request.load),
            ),
        )
        await self._ask(
            context,
            lambda call: ev.EngineTierReport(
                call=call,
                session=request.session,
                capacity_bytes=request.capacity_bytes,
                used_bytes=request.used_bytes,
                used_tokens=request.used_tokens,
                hit_tokens=request.hit_tokens,
                order=request.order,
                removed=Removed(request.removed_blocks, request.removed_bytes),
                refusal=request.refusal[:_REFUSAL_MAX],
                steps=steps,
                outcomes=outcomes,
                load=load,
            ),
        )
        return pb.ReportReply()

    async def Announce(self, request: pb.AnnounceRequest, context: _Context) -> pb.AnnounceReply:
        """Record new and finished requests."""
        requests, over = await _read(
            context, lambda: (_announced_of(request.requests), ended_ids_from_wire(request.over))
        )
        await self._ask(context, lambda call: ev.Announce(call, request.session, requests, over))
        return pb.AnnounceReply()

    async def Lookup(self, request: pb.LookupRequest, context: _Context) -> pb.LookupReply:
        """Return which blocks are cached, and how many are worth restoring."""
        start_ns = time.monotonic_ns()
        traits, load = await _read(
            context, lambda: (traits_from_wire(request.traits), load_from_wire(request.load))
        )
        with TRACES.serve("decision", context.invocation_metadata()) as step:
            answer = await self._ask(
                context,
                lambda call: ev.Lookup(
                    call=call,
                    session=request.session,
                    tenant=request.chain.tenant,
                    hashes=request.chain.hashes,
                    first=request.first,
                    deadline_ns=_deadline_ns(request.deadline_ms),
                    traits=traits,
                    load=load,
                ),
            )
            assert isinstance(answer, ac.LookupResult)
            _tell(step, answer)
        seconds = (time.monotonic_ns() - start_ns) / 1e9
        self._driver.node.metrics.observe(LOOKUP_SECONDS, seconds)
        return pb.LookupReply(
            tiers=[tier_to_wire(tier) for tier, _ in answer.runs],
            lengths=[length for _, length in answer.runs],
            reason=answer.reason,
            plan=None if answer.plan is None else plan_to_wire(answer.plan),
            max_offload_tokens=answer.max_offload_tokens,
            empty_ms=EMPTY_MS if answer.is_empty else 0,
        )

    async def Load(self, request: pb.LoadRequest, context: _Context) -> AsyncIterator[pb.LoadReply]:
        """Stream leased blocks as they become ready; if the call ends early, so does the lease."""
        with TRACES.serve("restore", context.invocation_metadata()) as step:
            step.set(decision=request.decision)
            wanted = split_hashes(request.chain.hashes) if step.span else []
            with TRACES.waiting(step, wanted[request.first :]):
                async with contextlib.aclosing(self._load(request, context)) as replies:
                    async for reply in replies:
                        yield reply

    async def _load(
        self, request: pb.LoadRequest, context: _Context
    ) -> AsyncGenerator[pb.LoadReply]:
        messages = self._driver.stream(
            lambda call: ev.Load(
                call=call,
                session=request.session,
                tenant=request.chain.tenant,
                hashes=request.chain.hashes,
                first=request.first,
                deadline_ns=_deadline_ns(request.deadline_ms),
                decision=request.decision,
                from_back=request.from_back,
                purpose=purpose_from_wire(request.purpose),
            )
        )
        lease, is_ended = 0, False
        try:
            async for message in messages:
                if isinstance(message, ac.CallReply):
                    assert isinstance(message.answer, ac.Refused)
                    await _refuse(context, message.answer.kind, message.answer.message)
                lease = message.lease
                yield pb.LoadReply(
                    lease=lease,
                    offsets=message.offsets,
                    checksums=b"".join(message.checksums),
                    tiers=map(tier_to_wire, message.tiers),
                    end=message.end,
                    blocks=message.num_blocks,
                )
                is_ended = bool(
                    message.end
                )  # only here, because a client that disconnected did not release it
        finally:
            if not is_ended:
                await messages.aclose()
                self._driver.post(ev.Release(None, request.session, lease))

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseReply:
        """End a load's lease."""
        answer = await self._ask(
            context,
            lambda call: ev.Release(call, request.session, request.lease, tuple(request.corrupt)),
        )
        assert isinstance(answer, ac.ReleaseResult)
        return pb.ReleaseReply(held=answer.held)

    async def PrepareStore(
        self, request: pb.PrepareStoreRequest, context: _Context
    ) -> pb.PrepareStoreReply:
        """Lease slots for new blocks."""
        traits = await _read(context, lambda: traits_from_wire(request.traits))
        num_prompt_blocks = request.prompt_blocks if request.HasField("prompt_blocks") else -1
        with TRACES.serve("admission", context.invocation_metadata()) as step:
            answer = await self._ask(
                context,
                lambda call: ev.PrepareStore(
                    call=call,
                    session=request.session,
                    tenant=request.chain.tenant,
                    hashes=request.chain.hashes,
                    first=request.first,
                    traits=traits,
                    num_prompt_blocks=num_prompt_blocks,
                ),
            )
            assert isinstance(answer, ac.StoreGrant)
            step.set(granted_blocks=len(answer.indexes), rejected_blocks=answer.rejected_blocks)
        return pb.PrepareStoreReply(
            lease=answer.lease,
            indexes=answer.indexes,
            offsets=answer.offsets,
            present_blocks=answer.present_blocks,
            rejected_blocks=answer.rejected_blocks,
            reason=answer.reason,
        )

    async def CompleteStore(
        self, request: pb.CompleteStoreRequest, context: _Context
    ) -> pb.CompleteStoreReply:
        """Publish the copied blocks."""
        joined = request.checksums
        checksums = tuple(joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES))
        if checksums and len(checksums[-1]) != HASH_BYTES:
            await _refuse(
                context, "chain", "the length of checksums must be a multiple of 16 bytes"
            )
        answer = await self._ask(
            context,
            lambda call: ev.CompleteStore(call, request.session, request.lease, checksums),
        )
        assert isinstance(answer, ac.StoreResult)
        return pb.CompleteStoreReply(stored_blocks=answer.num_blocks)

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.Changes]:
        """Stream which blocks of the session's key space the tiers hold, until it disconnects."""
        if request.session not in self._driver.node.sessions:
            await _refuse(context, "session", "register first")
        if self._driver.is_watching(request.session):
            await _refuse(context, "too_many", "the session already has a Watch call")
        async with contextlib.aclosing(self._driver.watch(request.session)) as batches:
            async for changes in batches:
                yield pb.Changes(changes=map(change_to_wire, changes))

    async def Clear(self, request: pb.ClearRequest, context: _Context) -> pb.ClearReply:
        """Remove the session's key space from all tiers."""
        node = self._driver.node
        session = node.sessions.get(request.session)
        if session is None:
            await _refuse(context, "session", "register first")
        tiers = tuple(
            tier for tier in LOWER_TIERS if tier is TierName.CPU or tier in node.transfers.lanes
        )
        selection, deadline_ns = Selection(session.key_space), _deadline_ns(request.deadline_ms)
        answer = await self._ask(context, lambda call: ev.Drop(call, tiers, deadline_ns, selection))
        assert isinstance(answer, tuple)
        faults = [
            f"{each.tier}: {each.error or f'{each.kept_blocks} blocks are in use'}"
            for each in answer
            if each.error or each.kept_blocks
        ]
        return pb.ClearReply(
            blocks=sum(each.num_blocks for each in answer), error="; ".join(faults)
        )

    async def _ask(self, context: _Context, make: Callable[[int], ev.Event]) -> ac.Answer:
        answer = await self._driver.ask(make)
        if isinstance(answer, ac.Refused):
            await _refuse(context, answer.kind, answer.message)
        return answer


def _announced_of(requests: Sequence[pb.Announced]) -> tuple[ev.AnnouncedRequest, ...]:
    """Return the requests of one call."""
    check_length("requests", requests, ANNOUNCED_MAX)
    return tuple(
        ev.AnnouncedRequest(
            traits_from_wire(each.traits), each.chain.tenant, each.chain.hashes, each.first
        )
        for each in requests
    )


def _tell(step: TraceStep, answer: ac.LookupResult) -> None:
    """Add the result and the decision to a trace."""
    step.set(
        found=" ".join(f"{tier}:{length}" for tier, length in answer.runs),
        why_no_more=answer.reason,
    )
    if (plan := answer.plan) is not None:
        step.set(
            decision=plan.decision,
            reason=plan.reason.value,
            planned_blocks=plan.num_blocks,
            predicted_s=plan.total_s,
            recompute_s=plan.recompute_total_s,
        )


async def _read(context: _Context, read: Callable[[], T]) -> T:
    """Return the result of ``read``, or refuse the call if it raises ValueError."""
    try:
        return read()
    except ValueError as wrong:
        await _refuse(context, "field", str(wrong))


async def _refuse(context: _Context, kind: str, message: str) -> NoReturn:
    await context.abort(_STATUS[kind], message)
    raise AssertionError("abort raises")


def _deadline_ns(deadline_ms: int) -> int:
    return time.monotonic_ns() + min(deadline_ms, _DEADLINE_MS_MAX) * 1_000_000
