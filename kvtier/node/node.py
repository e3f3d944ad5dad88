"""The node: every decision of the daemon, as ``handle(event, now_ns) -> actions``.

Theory
------
The node is a synchronous state machine. It reads no clock, does no I/O and never waits: it is told
what happened and when, and answers with what should be done. The asyncio driver beside it carries
actions out and brings completions back; the simulator does the same with simulated tiers and a
simulated clock, so the very code that runs in production runs under thousands of seeds.

Rules
-----
* One writer: ``handle`` is called from one thread.
* Every call gets exactly one answer, by its deadline, as long as ``Tick`` comes when
  ``next_deadline_ns`` says.
* An ended transfer is told once, however late; until then its slots belong to it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.core.admission import Admission
from kvtier.core.eviction import Eviction
from kvtier.core.identity import HASH_BYTES, split_hashes
from kvtier.core.index import Scope
from kvtier.core.layout import KNOWN_LAYOUTS
from kvtier.core.limits import CHAIN_BLOCKS_MAX, ENGINE_SHARE, SESSIONS_MAX, STORE_ARENA_SHARE
from kvtier.core.residency import Residency, TierName
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.node import event as ev
from kvtier.node.action import Action, Found, Refused, Registered, Released, Reply
from kvtier.node.cache import Cache
from kvtier.node.demotion import Demotion
from kvtier.node.drop import Drops
from kvtier.node.load import Loads
from kvtier.node.probe import PendingLookup, Probes
from kvtier.node.run import Chain, Run, find_run
from kvtier.node.session import EngineReport, Session
from kvtier.node.store import Stores
from kvtier.node.transfer import Lane, SlowTier, Transfers
from kvtier.observe.metrics import Metrics
from kvtier.observe.table import (
    EVICTED_BLOCKS,
    LOOKUP_BLOCKS,
    MISS_BLOCKS,
    QUARANTINED_BLOCKS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
)
from kvtier.tiers.base import MissReason, WriteOutcome

__all__ = ["Node", "NodeSettings"]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a node is told about itself."""

    boot: str
    """Changes whenever the daemon starts, so that clients notice."""
    num_slabs: int
    slab_bytes: int
    lease_ns: int
    tiers: tuple[SlowTier, ...] = ()


_DAMAGE = frozenset(
    {MissReason.CHECKSUM, MissReason.HEADER, MissReason.LENGTH, MissReason.SEAL},
)
"""Why a read found nothing, where something was there and is not what was written."""


class Node:
    """See the module. Attributes are for the driver's status reports and for tests."""

    def __init__(
        self, settings: NodeSettings, eviction: Eviction, admission: Admission, metrics: Metrics
    ) -> None:
        self.boot = settings.boot
        self._lease_ns = settings.lease_ns
        self.sessions: dict[str, Session] = {}
        self.metrics = metrics
        slots = SlabAllocator(settings.num_slabs, settings.slab_bytes)
        self.cache = Cache(slots, eviction, metrics)
        self.transfers = Transfers(self.cache, settings.tiers, admission)
        self.loads = Loads(self.cache, self.transfers, settings.lease_ns)
        self.stores = Stores(self.cache, self.loads, self.transfers, admission, settings.lease_ns)
        self.drops = Drops(self.cache, self.transfers, self.sessions)
        self.probes = Probes(self.cache)
        self._demotion = Demotion(self.cache, self.transfers)
        self._num_sessions = 0
        self._reactions: dict[type, Callable[..., list[Action]]] = {
            ev.Register: self._register,
            ev.Lookup: self._lookup,
            ev.Load: self._load,
            ev.Release: self._release,
            ev.PrepareStore: self._prepare_store,
            ev.CompleteStore: self._complete_store,
            ev.Report: self._report,
            ev.SessionEnded: self._session_ended,
            ev.Drop: self._drop,
            ev.ReadDone: self._read_done,
            ev.WriteDone: self._write_done,
            ev.ProbeDone: self._probe_done,
            ev.PurgeDone: self._purge_done,
            ev.Lost: self._lost,
            ev.TierUp: self._tier_up,
            ev.SlabsReserved: self._slabs_reserved,
            ev.Recovered: self._recovered,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now_ns: int) -> list[Action]:
        """Take one event in, and return what is to be done about it, in order."""
        actions = self._reactions[type(event)](event, now_ns)
        for row in self.transfers.note_overdue(now_ns):
            actions += self.loads.block_stuck(row)
        for lane, rows in self.transfers.shed_unusable(now_ns):
            for row in rows:
                self.metrics.add(MISS_BLOCKS, tier=lane.tier.name, reason="fault")
                actions += self.loads.block_missed(row, now_ns)
        self._demotion.advance(now_ns)
        actions += self.drops.advance(now_ns)
        actions += self.transfers.pump(now_ns)
        return actions

    def next_deadline_ns(self) -> int | None:
        """Return when a ``Tick`` is due, if nothing else happens before."""
        deadlines = [
            self.drops.next_deadline_ns(),
            self.transfers.next_deadline_ns(),
            self.probes.next_deadline_ns(),
        ]
        deadlines += [
            lease.expires_ns if lease.is_ended else lease.deadline_ns
            for session in self.sessions.values()
            for lease in session.loads.values()
        ]
        return min((at for at in deadlines if at is not None), default=None)

    @property
    def num_pins(self) -> int:
        """Return how many pins there are; 0 when the node is idle."""
        return self.cache.num_pins

    @property
    def num_leases(self) -> int:
        """Return how many leases are open."""
        return sum(len(s.loads) + len(s.stores) for s in self.sessions.values())

    # Sessions

    def _register(self, event: ev.Register, _now_ns: int) -> list[Action]:
        refusal = self._refusal(event)
        if refusal:
            return [Reply(event.call, Refused("registration", refusal))]
        if len(self.sessions) >= SESSIONS_MAX:
            full = f"{SESSIONS_MAX} engines are attached already"
            return [Reply(event.call, Refused("too_many", full))]
        self._num_sessions += 1
        # Only who holds the ticket can know it: each later call is let in by this alone.
        secret = f"kvtier.session {self.boot}.{self._num_sessions} {event.ticket}"
        token = hashlib.sha256(secret.encode()).hexdigest()[:32]
        self.sessions[token] = Session(
            token=token,
            ticket=event.ticket,
            key_space=event.key_space,
            layout=event.layout,
            engine=event.engine,
            transport=event.transport,
            pid=event.pid,
        )
        return [Reply(event.call, Registered(token, self.boot, self._lease_ns))]

    def _refusal(self, event: ev.Register) -> str:
        """Return why a registration cannot be served, or nothing."""
        layout = event.layout
        if (layout.name, layout.version) not in KNOWN_LAYOUTS:
            return f"layout {layout.name!r} version {layout.version} is not known to this daemon"
        if len(event.key_space) != HASH_BYTES:
            return f"key_space has {len(event.key_space)} bytes, not {HASH_BYTES}"
        size, slab_bytes = slot_bytes(layout.block_bytes), self.cache.slots.slab_bytes
        if size > slab_bytes:
            return f"a block takes {size} bytes and cpu.slab is {slab_bytes}; raise cpu.slab"
        # What an engine alone may hold in stores must have room for one block.
        least_bytes = int(size / STORE_ARENA_SHARE * (ENGINE_SHARE + 1) / ENGINE_SHARE)
        if least_bytes > self.cache.slots.capacity_bytes:
            return f"a block takes {size} bytes; raise cpu.capacity to at least {least_bytes} bytes"
        return ""

    def _report(self, event: ev.Report, _now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        if session is None:
            return [_unknown_session(event.call)]
        session.report = EngineReport(
            event.capacity_bytes, event.used_bytes, event.used_tokens, event.hit_tokens
        )
        if event.order:
            self.drops.answered(event.order, event.removed)
        return [Reply(event.call, None)]

    def _session_ended(self, event: ev.SessionEnded, _now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for session in [s for s in self.sessions.values() if s.ticket == event.ticket]:
            del self.sessions[session.token]
            for number in list(session.loads):
                actions += self.loads.release(session, number)[1]
            actions += self.stores.abandon(session)
            self.drops.session_ended(session.token)
        return actions

    # Lookups and loads

    def _lookup(self, event: ev.Lookup, now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        if session is None:
            return [_unknown_session(event.call)]
        if fault := _chain_fault(event.hashes, event.tenant, event.first):
            return [Reply(event.call, Refused("chain", fault))]
        chain = _chain_of(session, event)
        run = self._find(chain, event.first, now_ns)
        remote = self.transfers.lanes.get(TierName.REMOTE)
        is_open = run.reason == "absent" and not self.cache.is_closed(chain.scope)
        if remote is None or not is_open or _has_repeats(event.hashes):
            return [self._found(event, run)]
        probe = self.probes.start(
            event,
            chain,
            event.first + len(run),
            session.layout.block_tokens,
            lane=remote,
            now_ns=now_ns,
        )
        return [self._found(event, run) if probe is None else probe]

    def _probe_done(self, event: ev.ProbeDone, now_ns: int) -> list[Action]:
        lookup = self.probes.end(event, now_ns)
        return [] if lookup is None else [self._answer(lookup, now_ns)]

    def _answer(self, lookup: PendingLookup, now_ns: int) -> Reply:
        """Answer a lookup that waited with what is known now."""
        if lookup.event.session not in self.sessions:
            return _unknown_session(lookup.event.call)
        run = self._find(lookup.chain, lookup.event.first, now_ns)
        return self._found(lookup.event, run)

    def _load(self, event: ev.Load, now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        if session is None:
            return [_unknown_session(event.call)]
        if fault := _chain_fault(event.hashes, event.tenant, event.first):
            return [Reply(event.call, Refused("chain", fault))]
        chain = _chain_of(session, event)
        run = self._find(chain, event.first, now_ns)
        before = self.cache.index.find(chain.keys[: event.first if len(run) else 0])
        return self.loads.start(event, session, before[before >= 0], run, now_ns)

    def _release(self, event: ev.Release, _now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        released, actions = Released(held=False), list[Action]()
        if session is not None:
            released, actions = self.loads.release(session, event.lease, event.corrupt)
        return actions if event.call is None else [*actions, Reply(event.call, released)]

    def _find(self, chain: Chain, first: int, now_ns: int) -> Run:
        usable = {
            name
            for name, lane in self.transfers.lanes.items()
            if lane.is_usable(now_ns) and not lane.is_closed(chain.scope)
        }
        if self.cache.is_closed(chain.scope):
            usable.clear()  # whatever is loaded goes through the CPU tier
        else:
            usable.add(TierName.CPU)
        run = find_run(self.cache.index, chain, first, frozenset(usable))
        return run.without(self.transfers.stuck())

    def _found(self, event: ev.Lookup, run: Run) -> Reply:
        runs = run.by_tier()
        pending = int(run.is_writing.sum())
        misses = len(event.hashes) // HASH_BYTES - event.first - len(run)
        hits = Counter({TierName.CPU: -pending})
        for tier, length in runs:
            hits[tier] += length
        for tier, count in hits.items():
            self.metrics.add(LOOKUP_BLOCKS, count, outcome="hit", tier=tier)
        self.metrics.add(LOOKUP_BLOCKS, pending, outcome="pending", tier=TierName.CPU)
        self.metrics.add(LOOKUP_BLOCKS, misses, outcome="miss", tier="none")
        return Reply(event.call, Found(runs, run.reason))

    # Stores

    def _prepare_store(self, event: ev.PrepareStore, now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        if session is None:
            return [_unknown_session(event.call)]
        if fault := _chain_fault(event.hashes, event.tenant, event.first):
            return [Reply(event.call, Refused("chain", fault))]
        if _has_repeats(event.hashes):
            return [Reply(event.call, Refused("chain", "a chain names each block once"))]
        chain = _chain_of(session, event)
        return [Reply(event.call, self.stores.prepare(session, chain, event.first, now_ns))]

    def _complete_store(self, event: ev.CompleteStore, now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        if session is None:
            return [_unknown_session(event.call)]
        stored, actions = self.stores.complete(session, event, now_ns)
        return [Reply(event.call, stored), *actions]

    # Completions of tiers

    def _read_done(self, event: ev.ReadDone, now_ns: int) -> list[Action]:
        lane, rows = self.transfers.end(event.transfer)
        tier = lane.tier.name
        actions: list[Action] = []
        if event.fault:
            self.metrics.add(MISS_BLOCKS, len(rows), tier=tier, reason="fault")
            self._count_bytes(f"{tier}_to_cpu", rows, "failed")
            for row in rows:
                actions += self.loads.block_missed(row, now_ns)
            return actions
        self.metrics.observe(TRANSFER_SECONDS, event.seconds, route=f"{tier}_to_cpu")
        for row, result in zip(rows, event.results, strict=True):
            if isinstance(result, MissReason):
                self.metrics.add(MISS_BLOCKS, tier=tier, reason=result)
                self.metrics.add(QUARANTINED_BLOCKS, result in _DAMAGE, tier=tier)
                # Before the row may be forgotten: it is in the CPU tier's state writing till then.
                self.cache.index.move(row, tier, Residency.ABSENT)
                actions += self.loads.block_missed(row, now_ns)
            else:
                self._count_bytes(f"{tier}_to_cpu", (row,), "complete")
                self.cache.publish(row, result)
                actions += self.loads.block_ready(row)
        return actions

    def _write_done(self, event: ev.WriteDone, _now_ns: int) -> list[Action]:
        lane, rows = self.transfers.end(event.transfer)
        tier, index = lane.tier.name, self.cache.index
        if event.fault:
            self._count_bytes(f"cpu_to_{tier}", rows, "failed")
            index.move(np.array(rows), tier, Residency.ABSENT)
            index.forget_absent(np.array(rows))
            return []
        self.metrics.observe(TRANSFER_SECONDS, event.seconds, route=f"cpu_to_{tier}")
        for row, result in zip(rows, event.results, strict=True):
            is_stored = result is WriteOutcome.STORED
            index.move(row, tier, Residency.READY if is_stored else Residency.ABSENT)
            self._count_bytes(f"cpu_to_{tier}", (row,), "complete" if is_stored else "failed")
            if result is None:
                self.metrics.add(MISS_BLOCKS, tier=TierName.CPU, reason="checksum")
                self.cache.condemn(row)
        if tier is TierName.REMOTE:
            self.probes.note_stored(index.hash_of(row) for row in rows)
        # One that was condemned before may have left the CPU tier when this write let go of it.
        index.forget_absent(np.array(rows))
        self._forget(lane, event.evicted, "capacity")
        return []

    def _forget(self, lane: Lane, hashes: bytes, reason: str) -> None:
        """Note which blocks a tier has let go."""
        if not hashes:
            return
        if reason == "corrupt":
            num_blocks = len(hashes) // HASH_BYTES
            self.metrics.add(QUARANTINED_BLOCKS, num_blocks, tier=lane.tier.name)
        index, tier = self.cache.index, lane.tier.name
        rows = index.find(np.frombuffer(hashes, dtype="<u8").reshape(-1, 2))
        rows = rows[rows >= 0]
        rows = rows[index.residency(rows, tier) == Residency.READY]
        index.move(rows, tier, Residency.ABSENT)
        index.forget_absent(rows)
        self.metrics.add(EVICTED_BLOCKS, len(rows), tier=tier, reason=reason)

    def _count_bytes(self, route: str, rows: Sequence[int], outcome: str) -> None:
        num_bytes = int(self.cache.index.payload_bytes[np.array(rows)].sum())
        self.metrics.add(TRANSFER_BYTES, num_bytes, route=route, outcome=outcome)

    # The rest

    def _drop(self, event: ev.Drop, now_ns: int) -> list[Action]:
        actions = self.drops.start(event, now_ns)
        if {TierName.CPU, TierName.REMOTE} & set(event.tiers):
            interrupted = self.probes.interrupt(event.selection)
            actions += [self._answer(lookup, now_ns) for lookup in interrupted]
        return actions

    def _purge_done(self, event: ev.PurgeDone, _now_ns: int) -> list[Action]:
        self.drops.purged(event)
        return []

    def _lost(self, event: ev.Lost, _now_ns: int) -> list[Action]:
        self._forget(self.transfers.lanes[event.tier], event.hashes, event.reason)
        return []

    def _tier_up(self, event: ev.TierUp, _now_ns: int) -> list[Action]:
        self.transfers.lanes[event.tier].is_up = event.is_up
        return []

    def _slabs_reserved(self, event: ev.SlabsReserved, _now_ns: int) -> list[Action]:
        self.cache.slots.reserve(event.num_slabs)
        return []

    def _recovered(self, event: ev.Recovered, _now_ns: int) -> list[Action]:
        self.cache.index.restore(event.headers, event.tier)
        return []

    def _tick(self, _event: ev.Tick, now_ns: int) -> list[Action]:
        actions = self.loads.expire(self.sessions.values(), now_ns)
        late = self.probes.expire(now_ns)
        return actions + [self._answer(lookup, now_ns) for lookup in late]


def _unknown_session(call: int) -> Reply:
    return Reply(call, Refused("session", "this daemon does not know the session; register again"))


def _chain_of(session: Session, event: ev.Lookup | ev.Load | ev.PrepareStore) -> Chain:
    scope = Scope(session.key_space, event.tenant)
    return Chain.of(scope, event.hashes, session.layout.block_bytes)


def _has_repeats(hashes: bytes) -> bool:
    return len(set(split_hashes(hashes))) < len(hashes) // HASH_BYTES


def _chain_fault(hashes: bytes, tenant: bytes, first: int) -> str:
    """Return what is wrong with a chain that came from outside, or nothing."""
    if len(hashes) % HASH_BYTES or len(tenant) != HASH_BYTES:
        return f"hashes and the tenant come in pieces of {HASH_BYTES} bytes"
    num_blocks = len(hashes) // HASH_BYTES
    if num_blocks > CHAIN_BLOCKS_MAX:
        return f"a chain of {num_blocks} blocks; {CHAIN_BLOCKS_MAX} is the most"
    if first > num_blocks:
        return f"first is {first} in a chain of {num_blocks} blocks"
    return ""
