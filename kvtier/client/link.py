"""A registered session with one daemon: its channel, its arena, and the calls of its own threads.

A link is used until something fails; then it is closed and replaced. Every call has a timeout, and
every failure is raised as ``DaemonUnavailable``.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import grpc
from grpc.experimental import ChannelOptions

from kvtier.client.outbox import AnnouncedBatch, MeasuredBatch
from kvtier.client.types import OwnTier
from kvtier.core.identity import BlockHash, BlockHeader, KeySpace, chain_root
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.plan import ModelFlops
from kvtier.core.residency_change import ResidencyChange
from kvtier.errors import CallRefused, DaemonSlow, DaemonUnavailable, RegistrationRefused
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
    step_to_wire,
    traits_to_wire,
)

__all__ = ["DaemonLink", "chain_to_wire", "open_link", "rpc_faults"]

_CONNECT_TIMEOUT_S = 2.0
"""Enough for a busy daemon's first answer; meanwhile the engine recomputes."""

_LEASE_MARGIN_S = 0.5
"""Copying stops this long before a lease ends, or half the lease if that is less."""

_CHANNEL_OPTIONS = ((ChannelOptions.SingleThreadedUnaryStream, 1),)
"""Streams are read by the thread that iterates over them. With gRPC's own reader thread, every
stream, and close, would hang in a process that cannot start more threads."""


class DaemonLink:
    """One session with a daemon. Thread-safe."""

    def __init__(
        self,
        attachment: Attachment,
        channel: grpc.Channel,
        reply: pb.RegisterReply,
        space: KeySpace,
    ) -> None:
        self.attachment = attachment
        self.session = reply.session
        self.protocol = reply.protocol
        lease_s = reply.lease_ms / 1000
        self.lease_s = lease_s - min(_LEASE_MARGIN_S, lease_s / 2)
        """Seconds for which a lease certainly holds after its load."""
        self.stub = engine_pb2_grpc.EngineStub(quiet_channel(channel))
        self._channel = channel
        self._space = space
        self.is_broken = threading.Event()
        """Set by any thread once the link cannot be used any more."""
        self.num_users = 0
        """Calls that use the link; guarded by the keeper's lock."""

    def view(self, offset: int) -> memoryview:
        """Return the arena slot of one block at ``offset``."""
        return self.attachment.view(offset, self._space.layout.block_bytes)

    def header(
        self, tenant: bytes, hashes: Sequence[BlockHash], index: int, checksum: bytes = b""
    ) -> BlockHeader:
        """Return the header of block ``index`` of a chain."""
        root = chain_root(self._space.digest, tenant)
        return BlockHeader(
            key_space=self._space.digest,
            tenant=tenant,
            block_hash=hashes[index],
            parent_hash=hashes[index - 1] if index else root,
            position=index,
            payload_bytes=self._space.layout.block_bytes,
            checksum=checksum,
        )

    def announce(self, batch: AnnouncedBatch, timeout_s: float) -> None:
        """Announce new requests and report finished ones."""
        request = pb.AnnounceRequest(
            session=self.session,
            requests=[
                pb.Announced(
                    traits=traits_to_wire(each.traits),
                    chain=chain_to_wire(each.tenant, each.hashes),
                    first=min(each.first, len(each.hashes), CHAIN_BLOCKS_MAX),
                )
                for each in batch.requests
            ],
            over=batch.over,
        )
        with rpc_faults():
            self.stub.Announce(request, timeout=timeout_s)

    def report(self, own: OwnTier, measured: MeasuredBatch, timeout_s: float) -> None:
        """Report the usage of the engine's own tier, and measurements."""
        request = self._report_of(own)
        for step in measured.steps:
            with contextlib.suppress(ValueError):  # one that does not fit into a message
                request.steps.append(step_to_wire(step))
        for outcome in measured.outcomes:
            with contextlib.suppress(ValueError):
                request.outcomes.append(outcome_to_wire(outcome))
        if measured.load is not None:
            with contextlib.suppress(ValueError):
                request.load.CopyFrom(load_to_wire(measured.load))
        with rpc_faults():
            self.stub.Report(request, timeout=timeout_s)

    def drop_orders(self) -> Iterator[int]:
        """Yield the number of each order to drop the engine's own tier, until the link breaks.

        Raises DaemonUnavailable then.
        """
        with rpc_faults():
            for order in self.stub.Attend(pb.AttendRequest(session=self.session)):
                if order.HasField("drop"):  # a newer daemon may send other orders
                    yield order.order
        raise DaemonUnavailable("the daemon ended the session")

    def answer(self, order: int, removed: Removed | str, own: OwnTier, timeout_s: float) -> None:
        """Report what an order removed, or why it was refused."""
        request = self._report_of(own)
        request.order = order
        if isinstance(removed, str):
            request.refusal = removed
        else:
            request.removed_blocks = removed.num_blocks
            request.removed_bytes = removed.num_bytes
        with rpc_faults():
            self.stub.Report(request, timeout=timeout_s)

    def changes(self) -> Iterator[list[ResidencyChange]]:
        """Yield what the tiers hold of the key space, then every change, until the link breaks.

        Raises DaemonUnavailable then.
        """
        with rpc_faults():
            for reply in self.stub.Watch(pb.WatchRequest(session=self.session)):
                yield [change_from_wire(change) for change in reply.changes]
        raise DaemonUnavailable("the daemon ended the session")

    def close(self) -> None:
        """End the session. No copy may be running."""
        try:
            self._channel.close()
        finally:
            self.attachment.close()

    def _report_of(self, own: OwnTier) -> pb.ReportRequest:
        return pb.ReportRequest(
            session=self.session,
            capacity_bytes=own.capacity_bytes,
            used_bytes=own.used_bytes,
            used_tokens=own.used_tokens,
            hit_tokens=own.hit_tokens,
        )


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
    """Attach to the daemon and register. Raises DaemonUnavailable or RegistrationRefused."""
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
        with rpc_faults():
            stub = engine_pb2_grpc.EngineStub(quiet_channel(channel))
            reply = stub.Register(request, timeout=_CONNECT_TIMEOUT_S)
        link = DaemonLink(attachment, channel, reply, space)
        undo.pop_all()
    return link


def chain_to_wire(tenant: bytes, hashes: Sequence[BlockHash]) -> pb.Chain:
    """Return a chain as a message, cut at the daemon's limit: blocks beyond it are never kept."""
    return pb.Chain(tenant=tenant, hashes=b"".join(hashes[:CHAIN_BLOCKS_MAX]))


_FAULTS: Mapping[grpc.StatusCode, type[DaemonUnavailable]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DaemonSlow,
    grpc.StatusCode.INVALID_ARGUMENT: CallRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CallRefused,
}
"""Exceptions by status code. Any other status breaks the link."""


@contextlib.contextmanager
def rpc_faults() -> Iterator[None]:
    """Convert gRPC's exceptions to kvtier's."""
    try:
        yield
    except grpc.RpcError as error:
        call = cast("grpc.Call", error)  # errors raised by channels are also calls
        if call.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise RegistrationRefused(call.details()) from error
        kind = _FAULTS.get(call.code(), DaemonUnavailable)
        raise kind(f"{call.code().name}: {call.details()}") from error
    except ValueError as error:  # a call on a channel that another thread has closed
        raise DaemonUnavailable(str(error)) from error
