"""One registered session with one daemon: its channel, its arena, and what can be asked of it.

A link is good until something goes wrong with it; then it is closed and another one is made. Every
call has a timeout, and every fault comes out as ``DaemonUnavailable``.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc

from kvtier.client.outbox import Measured, Said
from kvtier.client.wire import (
    PROTOCOL,
    flops_to_wire,
    load_to_wire,
    outcome_to_wire,
    plan_from_wire,
    step_to_wire,
    tier_from_wire,
    tiers_from_wire,
    traits_to_wire,
)
from kvtier.core.cost.sample import EngineLoad, ModelFlops
from kvtier.core.identity import (
    HASH_BYTES,
    BlockHash,
    BlockHeader,
    KeySpace,
    chain_root,
    payload_checksum,
)
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.plan import Plan
from kvtier.core.residency import TierName
from kvtier.core.traits import Traits
from kvtier.errors import CallRefused, DaemonSlow, DaemonUnavailable, RegistrationRefused
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import Attachment, attach
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc

__all__ = ["Copy", "Found", "Link", "LoadedBlock", "OwnTier", "open_link"]

_CONNECT_TIMEOUT_S = 2.0
"""Enough for a busy daemon's first answer; the engine serves by recompute meanwhile."""

_LEASE_MARGIN_S = 0.5
"""Copying stops this long before a lease ends, or half the lease if that is less."""

_DAEMON_SHARE = 0.9
"""Of a load's time: by then the daemon says how far it got; the rest is for its last message."""

_RELEASE_TIMEOUT_S = 0.1
"""For a release after the load's own time is over; one that is lost lasts until the lease ends."""


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A verified block in the arena: copy it before asking for the next."""

    index: int
    """Of its chain."""
    tier: TierName
    payload: memoryview
    good_until_s: float = math.inf
    """On the monotonic clock: a copy that was made by then may be used, without another item."""


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to a lookup."""

    tiers: tuple[TierName, ...]
    """Of the leading blocks that can be loaded, from the first one asked for on."""
    reason: str
    """Why there are no more."""
    plan: Plan | None = None
    """How many of them should be loaded, and how; without one, all of them."""
    max_offload_tokens: int | None = None
    """How many leading tokens of this request it pays to offer; None: all of them."""


@dataclass(frozen=True, slots=True)
class OwnTier:
    """What an engine tells of its own tier."""

    capacity_bytes: int
    used_bytes: int
    used_tokens: int
    hit_tokens: int


Copy = Callable[[int, memoryview], None]
"""Fills a slot of the arena with block ``index`` of a chain."""


class Link:
    """See the module. Calls may come from several threads."""

    def __init__(
        self,
        attachment: Attachment,
        channel: grpc.Channel,
        reply: pb.RegisterReply,
        space: KeySpace,
    ) -> None:
        self.attachment = attachment
        self.session = reply.session
        self.boot = reply.boot
        lease_s = reply.lease_ms / 1000
        self._lease_s = lease_s - min(_LEASE_MARGIN_S, lease_s / 2)
        self._channel = channel
        self._stub = engine_pb2_grpc.EngineStub(channel)
        self._space = space
        self._block_bytes = space.layout.block_bytes

    def announce(self, said: Said, timeout_s: float) -> None:
        """Say which requests have come, and which are over."""
        request = pb.AnnounceRequest(
            session=self.session,
            requests=[
                pb.Announced(
                    traits=traits_to_wire(each.traits),
                    chain=_chain(each.tenant, each.hashes),
                    first=min(each.first, len(each.hashes), CHAIN_BLOCKS_MAX),
                )
                for each in said.requests
            ],
            over=said.over,
        )
        with _faults():
            self._stub.Announce(request, timeout=timeout_s)

    def lookup(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        timeout_s: float,
        *,
        traits: Traits,
        load: EngineLoad,
    ) -> Found:
        """Tell which blocks from ``first`` on can be loaded, how many should be, why no more."""
        request = pb.LookupRequest(
            session=self.session,
            chain=_chain(tenant, hashes),
            first=min(first, CHAIN_BLOCKS_MAX),
            deadline_ms=int(timeout_s * 1000),
            traits=traits_to_wire(traits),
            load=load_to_wire(load),
        )
        with _faults():
            reply = self._stub.Lookup(request, timeout=timeout_s)
            return Found(
                tiers_from_wire(reply.tiers, reply.lengths),
                reply.reason,
                plan_from_wire(reply.plan) if reply.HasField("plan") else None,
                reply.max_offload_tokens if reply.HasField("max_offload_tokens") else None,
            )

    def load(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        timeout_s: float,
        *,
        decision: int,
        from_back: bool,
    ) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks from ``first`` on, each as soon as it is there, then why no more.

        ``from_back``: the last of them comes first. A block is only good once the next item was
        asked for and came, or the end did: what was copied after its lease had run out must not be
        used, and raises here instead.
        """
        hashes = hashes[:CHAIN_BLOCKS_MAX]
        deadline_s = time.monotonic() + timeout_s
        request = pb.LoadRequest(
            session=self.session,
            chain=_chain(tenant, hashes),
            first=first,
            deadline_ms=int(timeout_s * _DAEMON_SHARE * 1000),
            decision=decision,
            from_back=from_back,
        )
        parents = [chain_root(self._space.digest, tenant), *hashes]
        lease_ends_s = time.monotonic() + timeout_s * _DAEMON_SHARE + self._lease_s
        lease = _Lease(num_blocks=len(hashes) - first)
        with _faults():
            replies = self._stub.Load(request, timeout=timeout_s)
            try:
                for place, slot in enumerate(_announced(replies, lease)):
                    index = first + (lease.num_blocks - 1 - place if from_back else place)
                    header = self._header(tenant, hashes, parents, index, slot.checksum)
                    payload = self.attachment.view(slot.offset, self._block_bytes)
                    if not header.matches(payload):
                        lease.corrupt.append(place)
                        lease.end = "corrupt"
                        break
                    yield LoadedBlock(index, slot.tier, payload, lease_ends_s)
                    if time.monotonic() > lease_ends_s:
                        raise DaemonSlow("the lease ran out while copying")
            finally:
                replies.cancel()  # type: ignore[no-untyped-call]  # gRPC's stubs leave it out
                self._release(lease, deadline_s - time.monotonic())
        yield lease.end or "daemon_away"

    def store(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        copy: Copy,
        timeout_s: float,
        *,
        traits: Traits,
        num_prompt_blocks: int,
    ) -> int:
        """Offer the blocks from ``first`` on; ``copy`` is called for those the daemon takes.

        Returns how many leading ones the daemon has now, stored or there before. If ``copy``
        raises, nothing of this store is kept.
        """
        hashes = hashes[:CHAIN_BLOCKS_MAX]
        if first >= len(hashes):
            return 0
        request = pb.PrepareStoreRequest(
            session=self.session,
            chain=_chain(tenant, hashes),
            first=first,
            traits=traits_to_wire(traits),
            prompt_blocks=None if num_prompt_blocks < 0 else num_prompt_blocks,
        )
        with _faults():
            granted = self._stub.PrepareStore(request, timeout=timeout_s)
        num_taken = len(hashes) - first
        if granted.rejected_blocks:
            num_taken = granted.indexes[-1] + 1 - first if granted.indexes else 0
        if not granted.indexes:
            return num_taken
        parents = [chain_root(self._space.digest, tenant), *hashes]
        checksums: list[bytes] = []
        try:
            for index, offset in zip(granted.indexes, granted.offsets, strict=True):
                payload = self.attachment.view(offset, self._block_bytes)
                copy(index, payload)
                header = self._header(tenant, hashes, parents, index)
                checksums.append(payload_checksum(header, payload))
        except BaseException:
            checksums.clear()
            raise
        finally:
            complete = pb.CompleteStoreRequest(
                session=self.session, lease=granted.lease, checksums=b"".join(checksums)
            )
            with _faults():
                stored = self._stub.CompleteStore(complete, timeout=timeout_s).stored_blocks
        return num_taken if stored == len(granted.indexes) else 0

    def report(self, own: OwnTier, measured: Measured, timeout_s: float) -> None:
        """Tell the daemon about the engine's own tier, and what was measured."""
        request = self._report(own)
        for step in measured.steps:
            with contextlib.suppress(ValueError):  # one that no message can carry
                request.steps.append(step_to_wire(step))
        for outcome in measured.outcomes:
            with contextlib.suppress(ValueError):
                request.outcomes.append(outcome_to_wire(outcome))
        if measured.load is not None:
            with contextlib.suppress(ValueError):
                request.load.CopyFrom(load_to_wire(measured.load))
        with _faults():
            self._stub.Report(request, timeout=timeout_s)

    def answer(self, order: int, removed: Removed, own: OwnTier, timeout_s: float) -> None:
        """Tell what came of an order."""
        request = self._report(own)
        request.order = order
        request.removed_blocks = removed.num_blocks
        request.removed_bytes = removed.num_bytes
        with _faults():
            self._stub.Report(request, timeout=timeout_s)

    def _report(self, own: OwnTier) -> pb.ReportRequest:
        return pb.ReportRequest(
            session=self.session,
            capacity_bytes=own.capacity_bytes,
            used_bytes=own.used_bytes,
            used_tokens=own.used_tokens,
            hit_tokens=own.hit_tokens,
        )

    def orders(self) -> Iterator[int]:
        """Yield orders until the link breaks; raises DaemonUnavailable then."""
        with _faults():
            for order in self._stub.Attend(pb.AttendRequest(session=self.session)):
                yield order.order
        raise DaemonUnavailable("the daemon ended the session")

    def close(self) -> None:
        """Let go of the session. No copy may be under way."""
        self._channel.close()
        self.attachment.close()

    def _header(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash],
        index: int,
        checksum: bytes = b"",
    ) -> BlockHeader:
        return BlockHeader(
            key_space=self._space.digest,
            tenant=tenant,
            block_hash=hashes[index],
            parent_hash=parents[index],
            position=index,
            payload_bytes=self._block_bytes,
            checksum=checksum,
        )

    def _release(self, lease: "_Lease", left_s: float) -> None:
        if not lease.number:
            return
        request = pb.ReleaseRequest(session=self.session, lease=lease.number, corrupt=lease.corrupt)
        with contextlib.suppress(DaemonUnavailable), _faults():  # else it expires by itself
            self._stub.Release(request, timeout=max(left_s, _RELEASE_TIMEOUT_S))


@dataclass(slots=True)
class _Lease:
    num_blocks: int
    number: int = 0
    end: str = ""
    corrupt: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Slot:
    offset: int
    checksum: bytes
    tier: TierName


def _chain(tenant: bytes, hashes: Sequence[BlockHash]) -> pb.Chain:
    """Return a chain as it travels; what is beyond the daemon's bound is never kept or found."""
    return pb.Chain(tenant=tenant, hashes=b"".join(hashes[:CHAIN_BLOCKS_MAX]))


def _announced(replies: Iterable[pb.LoadReply], lease: _Lease) -> Iterator[_Slot]:
    """Yield the slots of a load as they are announced, noting what is said of its lease."""
    for reply in replies:
        lease.number = reply.lease
        lease.num_blocks = reply.blocks or lease.num_blocks
        for place, offset in enumerate(reply.offsets):
            checksum = reply.checksums[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            yield _Slot(offset, checksum, tier_from_wire(reply.tiers[place]))
        lease.end = reply.end


def open_link(
    socket_path: Path,
    space: KeySpace,
    engine: str,
    *,
    flops: ModelFlops | None = None,
    can_split: bool = False,
) -> Link:
    """Attach and register. Raises DaemonUnavailable, or RegistrationRefused for good."""
    attachment = attach(socket_path, _CONNECT_TIMEOUT_S)
    channel = grpc.insecure_channel(f"unix:{socket_path}")
    layout = space.layout
    request = pb.RegisterRequest(
        protocol=PROTOCOL,
        ticket=attachment.ticket.encode(),
        proof=attachment.proof,
        key_space=space.digest,
        layout=pb.Layout(
            name=layout.name,
            version=layout.version,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            dtype=layout.dtype,
            detail=layout.detail,
        ),
        engine=engine,
        flops=flops_to_wire(flops or ModelFlops()),
        can_split=can_split,
    )
    try:
        with _faults():
            stub = engine_pb2_grpc.EngineStub(channel)
            reply = stub.Register(request, timeout=_CONNECT_TIMEOUT_S)
    except BaseException:
        channel.close()
        attachment.close()
        raise
    return Link(attachment, channel, reply, space)


_FAULTS: Mapping[grpc.StatusCode, type[DaemonUnavailable]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DaemonSlow,
    grpc.StatusCode.INVALID_ARGUMENT: CallRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CallRefused,
}
"""What a call's end says of the daemon; any other breaks the link."""


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Turn what gRPC raises into our own terms."""
    try:
        yield
    except grpc.RpcError as error:
        call = cast("grpc.Call", error)  # what a channel raises is both
        if call.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise RegistrationRefused(call.details()) from error
        kind = _FAULTS.get(call.code(), DaemonUnavailable)
        raise kind(f"{call.code().name}: {call.details()}") from error
    except ValueError as error:  # a call on a channel that another thread has closed
        raise DaemonUnavailable(str(error)) from error
