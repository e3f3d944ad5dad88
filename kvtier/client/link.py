"""One registered session with one daemon: its channel, its arena, and what can be asked of it.

A link is good until something goes wrong with it; then it is closed and another one is made. Every
call has a timeout, and every fault comes out as ``DaemonUnavailable``.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import grpc
from grpc.experimental import ChannelOptions

from kvtier.client.lease import HeldBlocks, OpenLoad, Slot
from kvtier.client.outbox import AnnouncedBatch, MeasuredBatch
from kvtier.client.types import Fill, FoundBlocks, LoadedBlock, OwnTier
from kvtier.core.identity import (
    BlockHash,
    BlockHeader,
    KeySpace,
    chain_root,
    payload_checksum,
)
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.plan import EngineLoad, ModelFlops
from kvtier.core.request import LoadPurpose, RequestTraits
from kvtier.core.residency import TierName
from kvtier.core.residency_change import ResidencyChange
from kvtier.errors import CallRefused, DaemonSlow, DaemonUnavailable, RegistrationRefused
from kvtier.observe.trace import TRACES
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import ArenaPin, Attachment, attach
from kvtier.v1 import engine_pb2 as pb
from kvtier.v1 import engine_pb2_grpc
from kvtier.wire.channel import quiet_channel
from kvtier.wire.convert import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    change_from_wire,
    flops_to_wire,
    layout_to_wire,
    load_to_wire,
    outcome_to_wire,
    plan_from_wire,
    purpose_to_wire,
    step_to_wire,
    tiers_from_wire,
    traits_to_wire,
)

__all__ = ["DaemonLink", "open_link"]

_CONNECT_TIMEOUT_S = 2.0
"""Enough for a busy daemon's first answer; the engine serves by recompute meanwhile."""

_LEASE_MARGIN_S = 0.5
"""Copying stops this long before a lease ends, or half the lease if that is less."""

_DAEMON_SHARE = 0.9
"""Of a load's time: by then the daemon says how far it got; the rest is for its last message."""

_RELEASE_TIMEOUT_S = 0.1
"""For a release after the load's own time is over; then it goes on without anybody's waiting."""

_LET_GO_TIMEOUT_S = 5.0
"""For a release that nobody waits for."""

_CHANNEL_OPTIONS = ((ChannelOptions.SingleThreadedUnaryStream, 1),)
"""Streams are read by whoever asks for them. With gRPC's own thread for that, a process that may
start no more threads would leave a channel on which every stream waits for ever, and its close."""


class DaemonLink:
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
        self.protocol = reply.protocol
        lease_s = reply.lease_ms / 1000
        self._lease_s = lease_s - min(_LEASE_MARGIN_S, lease_s / 2)
        self._channel = channel
        self._stub = engine_pb2_grpc.EngineStub(quiet_channel(channel))
        self._space = space
        self._block_bytes = space.layout.block_bytes
        self.is_broken = threading.Event()
        """Set where it is no good any more; from any thread."""
        self.num_users = 0
        """Calls that hold it; whoever counts them has a lock."""

    def announce(self, said: AnnouncedBatch, timeout_s: float) -> None:
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
        traits: RequestTraits,
        load: EngineLoad,
    ) -> FoundBlocks:
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
            reply = self._stub.Lookup(request, timeout=timeout_s, metadata=TRACES.metadata())
            return FoundBlocks(
                tiers_from_wire(reply.tiers, reply.lengths),
                reply.reason,
                plan_from_wire(reply.plan) if reply.HasField("plan") else None,
                reply.max_offload_tokens if reply.HasField("max_offload_tokens") else None,
                reply.empty_ms / 1000,
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
        is_held: bool,
    ) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks from ``first`` on, each as soon as it is there, then why no more.

        ``from_back``: the last of them comes first; ``is_held``: ``hold`` brought them up. A block
        is only good once the next item was asked for and came, or the end did: what was copied
        after its lease had run out must not be used, and raises here instead.
        """
        purpose = LoadPurpose.COPY_HELD if is_held else LoadPurpose.COPY
        call = self._begin(
            tenant, hashes, first, timeout_s, decision, from_back=from_back, purpose=purpose
        )
        with _faults():
            try:
                for place, slot in enumerate(call.announced()):
                    index = first + (call.num_blocks - 1 - place if from_back else place)
                    payload = self.attachment.view(slot.offset, self._block_bytes)
                    if not self._is_sound(call, index, slot, payload):
                        call.corrupt.append(place)
                        call.end = "corrupt"
                        break
                    yield LoadedBlock(index, slot.tier, payload, call.good_until_s)
                    if time.monotonic() > call.good_until_s:
                        raise DaemonSlow("the lease ran out while copying")
            finally:
                self._release(call)
        yield call.end or "daemon_away"

    def hold(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        timeout_s: float,
        *,
        decision: int,
    ) -> HeldBlocks:
        """Have blocks from ``first`` on brought up, verify them, and keep their lease."""
        call = self._begin(tenant, hashes, first, timeout_s, decision, purpose=LoadPurpose.HOLD)
        tiers: list[TierName] = []
        with _faults():
            try:
                for place, slot in enumerate(call.announced()):
                    payload = self.attachment.view(slot.offset, self._block_bytes)
                    # Behind a corrupt one nothing counts, but the lease lasts only if the call
                    # is heard to its end.
                    if call.corrupt:
                        continue
                    if self._is_sound(call, first + place, slot, payload):
                        tiers.append(slot.tier)
                    else:
                        call.corrupt.append(place)
            except BaseException:
                self._release(call)
                raise
        end = "corrupt" if call.corrupt else call.end or "daemon_away"
        held = HeldBlocks(tuple(tiers), end, call.good_until_s, partial(self._let_go, call))
        if not tiers:
            held.release()
        return held

    def store(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        fill: Fill,
        timeout_s: float,
        *,
        traits: RequestTraits,
        num_prompt_blocks: int,
    ) -> int:
        """Offer the blocks from ``first`` on; ``fill`` gets a slot for each that the daemon takes.

        Returns how many leading ones the daemon has now, stored or there before. If ``fill``
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
            granted = self._stub.PrepareStore(
                request, timeout=timeout_s, metadata=TRACES.metadata()
            )
        num_taken = len(hashes) - first
        if granted.rejected_blocks:
            num_taken = granted.indexes[-1] + 1 - first if granted.indexes else 0
        if not granted.indexes:
            return num_taken
        parents = [chain_root(self._space.digest, tenant), *hashes]
        checksums: list[bytes] = []
        try:
            slots = [self.attachment.view(each, self._block_bytes) for each in granted.offsets]
            with contextlib.closing(fill(granted.indexes, slots)) as filled:
                for index, payload, _ in zip(granted.indexes, slots, filled, strict=True):
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

    def report(self, own: OwnTier, measured: MeasuredBatch, timeout_s: float) -> None:
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

    def answer(self, order: int, removed: Removed | str, own: OwnTier, timeout_s: float) -> None:
        """Tell what came of an order, or why nothing does."""
        request = self._report(own)
        request.order = order
        if isinstance(removed, str):
            request.refusal = removed
        else:
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
                if order.HasField("drop"):  # a newer daemon may know others
                    yield order.order
        raise DaemonUnavailable("the daemon ended the session")

    def changes(self) -> Iterator[list[ResidencyChange]]:
        """Yield what the tiers have of the key space, and what comes and leaves, like orders."""
        with _faults():
            for told in self._stub.Watch(pb.WatchRequest(session=self.session)):
                yield [change_from_wire(change) for change in told.changes]
        raise DaemonUnavailable("the daemon ended the session")

    def clear(self, timeout_s: float) -> str:
        """Have the key space taken out of every tier; returns why not all of it, or nothing."""
        deadline_ms = int(timeout_s * _DAEMON_SHARE * 1000)
        request = pb.ClearRequest(session=self.session, deadline_ms=deadline_ms)
        with _faults():
            return self._stub.Clear(request, timeout=timeout_s).error

    def close(self) -> None:
        """Let go of the session. No copy may be under way."""
        try:
            self._channel.close()
        finally:
            self.attachment.close()

    def _begin(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        timeout_s: float,
        decision: int,
        *,
        purpose: LoadPurpose,
        from_back: bool = False,
    ) -> OpenLoad:
        """Ask for a load."""
        hashes = hashes[:CHAIN_BLOCKS_MAX]
        request = pb.LoadRequest(
            session=self.session,
            chain=_chain(tenant, hashes),
            first=first,
            deadline_ms=int(timeout_s * _DAEMON_SHARE * 1000),
            decision=decision,
            from_back=from_back,
            purpose=purpose_to_wire(purpose),
        )
        now_s = time.monotonic()
        with _faults():
            replies = self._stub.Load(request, timeout=timeout_s, metadata=TRACES.metadata())
        return OpenLoad(
            tenant,
            hashes,
            [chain_root(self._space.digest, tenant), *hashes],
            len(hashes) - first,
            now_s + timeout_s,
            now_s + timeout_s * _DAEMON_SHARE + self._lease_s,
            replies,
        )

    def _is_sound(self, load: OpenLoad, index: int, slot: Slot, payload: memoryview) -> bool:
        """Tell whether a slot holds the block of that index, whole."""
        header = self._header(load.tenant, load.hashes, load.parents, index, slot.checksum)
        return header.matches(payload)

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

    def _release(self, load: OpenLoad) -> None:
        """End a load and its lease, and wait a little until the daemon has heard of it."""
        timeout_s = max(load.left_s, _RELEASE_TIMEOUT_S)
        try:
            if load.lease:
                with _faults():
                    self._stub.Release(self._released(load), timeout=timeout_s)
        except DaemonSlow:
            self._let_go(load)
        except DaemonUnavailable:
            pass  # the session is over, and the lease with it
        finally:
            # Not before: the daemon ends the lease with the call, and hears of nothing corrupt.
            load.replies.cancel()

    def _let_go(self, load: OpenLoad) -> None:
        """End the lease of a load that is over, without waiting."""
        if not load.lease:
            return

        def release() -> None:
            with contextlib.suppress(DaemonUnavailable), _faults():
                self._stub.Release(self._released(load), timeout=_LET_GO_TIMEOUT_S)

        # Where no thread is to be had it expires by itself.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=release, name="kvtier-let-go", daemon=True).start()

    def _released(self, load: OpenLoad) -> pb.ReleaseRequest:
        return pb.ReleaseRequest(session=self.session, lease=load.lease, corrupt=load.corrupt)


def _chain(tenant: bytes, hashes: Sequence[BlockHash]) -> pb.Chain:
    """Return a chain as it travels; what is beyond the daemon's bound is never kept or found."""
    return pb.Chain(tenant=tenant, hashes=b"".join(hashes[:CHAIN_BLOCKS_MAX]))


def open_link(
    socket_path: Path,
    space: KeySpace,
    engine: str,
    *,
    flops: ModelFlops | None = None,
    can_split: bool = False,
    rank: int = 0,
    pin: ArenaPin | None = None,
) -> DaemonLink:
    """Attach and register. Raises DaemonUnavailable, or RegistrationRefused for good."""
    with contextlib.ExitStack() as undo:
        attachment = attach(socket_path, _CONNECT_TIMEOUT_S, pin)
        undo.callback(attachment.close)
        channel = grpc.insecure_channel(f"unix:{socket_path}", _CHANNEL_OPTIONS)
        undo.callback(channel.close)
        request = pb.RegisterRequest(
            protocol=PROTOCOL,
            oldest_protocol=OLDEST_PROTOCOL,
            ticket=attachment.ticket.encode(),
            proof=attachment.proof,
            key_space=space.digest,
            layout=layout_to_wire(space.layout),
            engine=engine,
            flops=flops_to_wire(flops or ModelFlops()),
            can_split=can_split,
            rank=rank,
        )
        with _faults():
            stub = engine_pb2_grpc.EngineStub(quiet_channel(channel))
            reply = stub.Register(request, timeout=_CONNECT_TIMEOUT_S)
        link = DaemonLink(attachment, channel, reply, space)
        undo.pop_all()
    return link


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
