"""An engine's client: looks up, loads and stores blocks, and fails open.

While there is no daemon, or it was too slow a moment ago, every call raises ``DaemonUnavailable``
at once, and the engine recomputes. See ``keeper`` for how the client finds its daemon.

How to write a connector
------------------------
For each request, call in this order:

1. ``announce`` the request when it arrives, with all full blocks of its prompt, even if it needs
   none of them. The daemon counts uses from it, and promotes blocks that will be needed.
2. ``lookup`` when the request is about to be scheduled, for the blocks that the engine's own tier
   lacks.
3. ``load`` as many of them as the plan says, and wait no longer than it says. Copy each block
   before asking for the next. Compute what does not arrive. An engine that must know what it will
   get before it allocates memory calls ``hold`` first, then loads what was held.
4. ``store`` full blocks once they are computed, those of the prompt and of the answer.
5. ``note_outcome`` after the first token, if there was a plan; and ``announce`` the request as over
   when it ends.

Also call ``note_steps`` with the durations of the engine's steps. kvtier works without this and
without 1 and 5, but decides with less knowledge: without 1 it counts uses only at lookups, without
step durations it does not know the cost of computing, and without outcomes it cannot tell whether
it helped.

``lookup``, ``hold``, ``load``, ``store`` and ``clear`` wait for the daemon, at most until their
deadlines, and raise ``DaemonUnavailable``; the engine then computes. ``announce`` and the ``note_``
calls never wait and never raise.

A session belongs to the process that started the client. In a forked child, every call of that
client raises ``DaemonUnavailable``; the child can create a client, with a session of its own.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kvtier.client.keeper import LinkKeeper
from kvtier.client.link import DaemonLink, chain_to_wire, open_link, rpc_faults
from kvtier.client.loads import HeldBlocks, OpenLoad
from kvtier.client.outbox import Announcement
from kvtier.client.types import (
    ClientDeadlines,
    Fill,
    FoundBlocks,
    LoadedBlock,
    OnChanges,
    OwnTier,
)
from kvtier.core.identity import BlockHash, KeySpace, payload_checksum
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.core.plan import EngineLoad, ModelFlops, PlanOutcome, StepSample
from kvtier.core.request import NO_TRAITS, LoadPurpose, RequestTraits
from kvtier.errors import CallRefused
from kvtier.observe.trace import TRACES
from kvtier.tiers.base import Removed
from kvtier.transfer.shm import ArenaPin
from kvtier.v1 import engine_pb2 as pb
from kvtier.wire.convert import (
    load_to_wire,
    plan_from_wire,
    tiers_from_wire,
    traits_fault,
    traits_to_wire,
)

__all__ = ["Client"]

_CLEAR_SHARE = 0.9
"""Share of ``clear``'s time after which the daemon reports what is left."""


class Client:
    """An engine's connection to its daemon, from ``start`` to ``close``. Thread-safe."""

    def __init__(  # noqa: PLR0913 - what an engine is made of; all but three have defaults
        self,
        socket_path: Path,
        space: KeySpace,
        engine: str,
        *,
        deadlines: ClientDeadlines | None = None,
        drop: Callable[[], Removed | str] = Removed,
        own_tier: Callable[[], OwnTier] | None = None,
        flops: ModelFlops | None = None,
        can_split: bool = False,
        rank: int = 0,
        watch: OnChanges | None = None,
        pin: ArenaPin | None = None,
    ) -> None:
        """``socket_path`` is where the daemon listens; ``find_socket`` may replace the default.

        ``own_tier`` reports the usage of the engine's own tier. ``drop`` empties that tier, or
        returns why it cannot and what would; it may raise TimeoutError if the engine is too busy,
        which is reported to the operator. ``flops`` is the cost of the model, used until steps have
        been measured. ``can_split``: the engine can compute the front of a prompt while the back is
        loaded. If several ``rank``s serve a request together, each with a client, the request is
        counted for rank 0. ``watch`` is called, on a thread of the client, with the blocks of the
        key space in the daemon's tiers and with every change. ``pin`` is called with every newly
        mapped arena, so that the device can register it.
        """
        self.deadlines = deadlines or ClientDeadlines()
        opener = partial(
            open_link,
            space=space,
            engine=engine,
            flops=flops,
            can_split=can_split,
            rank=rank,
            pin=pin,
        )
        self._keeper = LinkKeeper(
            socket_path, opener, self.deadlines, drop=drop, own_tier=own_tier, on_changes=watch
        )

    def start(self) -> None:
        """Start looking for the daemon; returns at once.

        If no thread can be started, closes itself and raises RuntimeError.
        """
        self._keeper.start()

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for a session; returns False on timeout."""
        return self._keeper.wait_attached(timeout_s)

    def close(self) -> None:
        """End the session once running calls have ended. Idempotent."""
        self._keeper.close()

    @property
    def is_attached(self) -> bool:
        """Return whether there is a session now."""
        return self._keeper.link is not None

    @property
    def session(self) -> str:
        """Return the session's name; empty without a session."""
        link = self._keeper.link
        return link.session if link else ""

    def announce(self, announced: Sequence[Announcement], over: Sequence[str] = ()) -> None:
        """Announce new requests and report the ids of finished ones.

        Returns at once: they are sent within a few milliseconds, many in one call. If no daemon is
        attached, or it is too slow, they are dropped, oldest first. A request that is looked up at
        once need not be announced.
        """
        if not self.is_attached:
            return
        sound = [each for each in announced if not self._warn_about(each.traits)]
        self._keeper.outbox.announce(sound, over)

    def lookup(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        traits: RequestTraits = NO_TRAITS,
        load: EngineLoad | None = None,
    ) -> FoundBlocks:
        """Look up the blocks from ``first`` on: which can be loaded, and how many are worth it.

        ``load`` is the engine's work ahead of this request, from which the daemon can tell whether
        restoring would delay the request more than computing. Raises CallRefused for invalid
        traits.
        """
        if fault := self._warn_about(traits):
            raise CallRefused(fault)
        if traits.request_id:
            self._keeper.outbox.withdraw(traits.request_id)
        timeout_s = self.deadlines.lookup_s
        with self._keeper.lend(request=traits.request_id) as link:
            request = pb.LookupRequest(
                session=link.session,
                chain=chain_to_wire(tenant, hashes),
                first=min(first, CHAIN_BLOCKS_MAX),
                deadline_ms=int(timeout_s * 1000),
                traits=traits_to_wire(traits),
                load=load_to_wire(load or EngineLoad()),
            )
            with rpc_faults():
                reply = link.stub.Lookup(request, timeout=timeout_s, metadata=TRACES.metadata())
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
        *,
        decision: int = 0,
        from_back: bool = False,
        is_held: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[LoadedBlock | str]:
        """Yield verified blocks from ``first`` on as they arrive, then the reason for the end.

        Blocks come in chain order, or ``from_back`` from the last one down. ``is_held``: another
        client holds them and has counted the load. ``decision`` is the number of the plan, 0
        without one; ``timeout_s`` defaults to the client's own deadline. Ending the iteration early
        cancels what has not arrived yet.

        A block is good only once the next item was requested and arrived. If the lease ran out
        while the caller copied, this raises DaemonSlow instead, and the copy must not be used.
        """
        purpose = LoadPurpose.COPY_HELD if is_held else LoadPurpose.COPY
        timeout_s = self.deadlines.load_s if timeout_s is None else timeout_s
        with self._keeper.lend(decision=decision) as link:
            yield from OpenLoad(
                link,
                tenant,
                hashes,
                first,
                timeout_s,
                decision=decision,
                purpose=purpose,
                from_back=from_back,
            ).blocks()

    def hold(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        decision: int = 0,
        timeout_s: float | None = None,
    ) -> HeldBlocks:
        """Promote the blocks from ``first`` on into the CPU tier and lease them until loaded.

        For engines that must know what they will get before they allocate memory. Waits like
        ``load``, verifies each block, and keeps what arrived even if the load fell short.
        """
        timeout_s = self.deadlines.load_s if timeout_s is None else timeout_s
        with self._keeper.lend(decision=decision) as link:
            load = OpenLoad(
                link,
                tenant,
                hashes,
                first,
                timeout_s,
                decision=decision,
                purpose=LoadPurpose.HOLD,
            )
            return load.hold()

    def store(
        self,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        first: int,
        fill: Fill,
        *,
        traits: RequestTraits = NO_TRAITS,
        num_prompt_blocks: int = -1,
    ) -> int:
        """Offer the blocks from ``first`` on; ``fill`` gets a slot for each that is accepted.

        Returns how many of the leading blocks the daemon has now, newly stored or present before.
        If ``fill`` raises, nothing of this store is kept. Blocks from ``num_prompt_blocks`` on hold
        generated tokens; -1: none does. Raises CallRefused for invalid traits.
        """
        if fault := self._warn_about(traits):
            raise CallRefused(fault)
        hashes = hashes[:CHAIN_BLOCKS_MAX]
        with self._keeper.lend(request=traits.request_id) as link:
            if first >= len(hashes):
                return 0
            request = pb.PrepareStoreRequest(
                session=link.session,
                chain=chain_to_wire(tenant, hashes),
                first=first,
                traits=traits_to_wire(traits),
                prompt_blocks=None if num_prompt_blocks < 0 else num_prompt_blocks,
            )
            with rpc_faults():
                granted = link.stub.PrepareStore(
                    request, timeout=self.deadlines.store_s, metadata=TRACES.metadata()
                )
            num_taken = len(hashes) - first
            if granted.rejected_blocks:
                num_taken = granted.indexes[-1] + 1 - first if granted.indexes else 0
            if not granted.indexes or self._fill(link, granted, tenant, hashes, fill):
                return num_taken
            return 0

    def _fill(
        self,
        link: DaemonLink,
        granted: pb.PrepareStoreReply,
        tenant: bytes,
        hashes: Sequence[BlockHash],
        fill: Fill,
    ) -> bool:
        """Fill the granted slots and complete the store; False if some blocks were not kept."""
        checksums: list[bytes] = []
        try:
            slots = [link.view(each) for each in granted.offsets]
            with contextlib.closing(fill(granted.indexes, slots)) as filled:
                for index, payload, _ in zip(granted.indexes, slots, filled, strict=True):
                    header = link.header(tenant, hashes, index)
                    checksums.append(payload_checksum(header, payload))
        except BaseException:
            checksums.clear()
            raise
        finally:
            complete = pb.CompleteStoreRequest(
                session=link.session, lease=granted.lease, checksums=b"".join(checksums)
            )
            with rpc_faults():
                reply = link.stub.CompleteStore(complete, timeout=self.deadlines.store_s)
        return reply.stored_blocks == len(granted.indexes)

    def clear(self, timeout_s: float) -> str:
        """Remove every block of the key space, of all tenants and from every tier.

        Returns why some are left, or an empty string. If none are left, none come back, not even
        from a store that began earlier.
        """
        deadline_ms = int(timeout_s * _CLEAR_SHARE * 1000)
        with self._keeper.lend() as link, rpc_faults():
            request = pb.ClearRequest(session=link.session, deadline_ms=deadline_ms)
            return link.stub.Clear(request, timeout=timeout_s).error

    def note_steps(self, steps: Sequence[StepSample], load: EngineLoad) -> None:
        """Record step durations and the current load for the next report.

        Returns at once. A report is sent once a second and carries a bounded number of steps, the
        newest ones.
        """
        self._keeper.outbox.note_steps(steps, load)

    def note_outcome(self, outcome: PlanOutcome) -> None:
        """Record how a restore plan turned out. Returns at once.

        Outcomes of an earlier daemon's plans are dropped.
        """
        self._keeper.outbox.note_outcome(outcome)

    def _warn_about(self, traits: RequestTraits) -> str:
        """Return what is wrong with traits, or an empty string, and log it."""
        fault = traits_fault(traits)
        if fault:
            self._keeper.warnings.warning(
                "a request's traits cannot be sent", request=traits.request_id, error=fault
            )
        return fault
