"""The node: makes every decision of the daemon, as ``handle(event, now_ns) -> actions``.

Theory
------
The node is a synchronous state machine. It reads no clock, does no I/O and never waits: an event
says what happened and when, and the returned actions say what to do. In the daemon the driver
(``kvtier.runtime``) carries the actions out and brings completions back. The simulator does the
same with simulated tiers and a simulated clock, so the code that runs in production also runs under
thousands of seeds.

Rules
-----
* ``handle`` is called from one thread only.
* Every call gets exactly one answer by its deadline, provided that a ``Tick`` comes when
  ``next_deadline_ns`` says.
* Every transfer ends with exactly one completion, however late; until then it owns its slots.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtier.core.admission import Admission
from kvtier.core.eviction.base import Eviction
from kvtier.core.fate import Fate
from kvtier.core.identity import EVERYTHING, HASH_BYTES
from kvtier.core.index import Scope
from kvtier.core.layout import KNOWN_LAYOUTS
from kvtier.core.limits import BLOCK_BYTES_MAX, ENGINE_SHARE, SESSIONS_MAX, STORE_ARENA_SHARE
from kvtier.core.planner import Planner
from kvtier.core.residency import TierName
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import History
from kvtier.core.slots import SlabAllocator, slot_bytes
from kvtier.core.slow_tier import AdminState, SlowTier
from kvtier.core.table import as_keys
from kvtier.node.flow.completion import Completions, Measurements
from kvtier.node.flow.cpu_allocator import CpuAllocator
from kvtier.node.flow.decision import Decisions
from kvtier.node.flow.demotion import Demotion, Flush
from kvtier.node.flow.load import Loads
from kvtier.node.flow.miss_fates import MissFates
from kvtier.node.flow.pending_lookup import PendingLookup, PendingLookups
from kvtier.node.flow.retention import Retention
from kvtier.node.flow.store import Stores
from kvtier.node.flow.tier_writes import TierWrites
from kvtier.node.flow.token_counters import count_lookup
from kvtier.node.flow.use_counter import UseCounter, use_of
from kvtier.node.messages import events as ev
from kvtier.node.messages.actions import (
    Action,
    CallReply,
    Refused,
    Registration,
    ReleaseResult,
    StoreResult,
)
from kvtier.node.operations.admin_state import AdminStates
from kvtier.node.operations.drop import Drops
from kvtier.node.operations.prefetcher import Prefetcher
from kvtier.node.operations.residency_feed import ResidencyFeeds
from kvtier.node.state.block_run import BlockRun, PromptChain, chain_fault, find_run, has_repeats
from kvtier.node.state.cache import Cache
from kvtier.node.state.decision_log import DecisionLog
from kvtier.node.state.session import EngineReport, Session
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import ANNOUNCED_REQUESTS, MISS_BLOCKS
from kvtier.observe.metrics import Metrics

__all__ = ["Node", "NodeSettings"]


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a node."""

    boot: str
    """Changes with every start of the daemon, so that clients notice a restart."""
    num_slabs: int
    slab_bytes: int
    lease_ns: int
    tiers: tuple[SlowTier, ...] = ()
    pin_share: float = 0.0
    """Share of the CPU tier that pins, priorities and announced requests may keep."""
    first_decision: int = 1
    """Number of the first decision; above all numbers of earlier runs."""


class Node:
    """Makes every decision of the daemon; see the module.

    Public attributes are for status reports and tests.
    """

    def __init__(
        self,
        settings: NodeSettings,
        eviction: Eviction,
        admission: Admission,
        metrics: Metrics,
        *,
        history: History | None = None,
        planner: Planner | None = None,
        depth: DepthCurves | None = None,
    ) -> None:
        self.boot = settings.boot
        self._lease_ns = settings.lease_ns
        self.sessions: dict[str, Session] = {}
        self.metrics = metrics
        slots = SlabAllocator(settings.num_slabs, settings.slab_bytes)
        self.cache = Cache(slots, eviction, metrics, history)
        self.transfers = TierTransfers(self.cache, settings.tiers)
        self.writes = TierWrites(self.cache, self.transfers, admission)
        self.flush = Flush(self.cache, self.transfers, self.writes, history)
        self.decision_log = DecisionLog(settings.first_decision)
        self.history, self.planner, self.depth = history, planner, depth
        self.use_counter = UseCounter(history, depth, self.cache.residency_listener)
        self.miss_fates = MissFates(self.cache, self.transfers, history, self.decision_log)
        self.retention = Retention(self.cache, settings.pin_share)
        self._demotion = Demotion(self.cache, self.transfers, self.writes)
        allocator = CpuAllocator(self.cache, self.retention, self._demotion)
        self.decisions = Decisions(self.transfers, planner, self.decision_log, metrics)
        self.measurements = Measurements(self.cache, planner)
        self.loads = Loads(allocator, self.transfers, self.miss_fates)
        self.stores = Stores(
            allocator, self.loads, self.transfers, admission, history=history, depth=depth
        )
        self.drops = Drops(self.cache, self.transfers, self.sessions)
        self._admin_states = AdminStates(self.cache, self.transfers, self.loads)
        self.feeds = ResidencyFeeds(self.cache.index, self._is_up)
        self.pending_lookups = PendingLookups(self.cache)
        self.prefetcher = Prefetcher(
            allocator,
            self.transfers,
            self.retention,
            self.decisions,
            find_run=self.find,
            block_bytes_of=self.writes.payload_bytes_of,
            history=history,
        )
        self._completions = Completions(
            self.cache,
            self.transfers,
            self.writes,
            self.loads,
            self.pending_lookups,
            self.measurements,
        )
        self._num_sessions = 0
        self._reactions = self._all_reactions()

    def handle(self, event: ev.Event, now_ns: int) -> list[Action]:
        """Handle one event, and return the actions to take, in order."""
        self.use_counter.advance(now_ns)
        actions = self._reactions[type(event)](event, now_ns) or []
        for lane, transfer in self.transfers.note_overdue(now_ns):
            self.measurements.overdue(lane, transfer, now_ns)
            for row in transfer.rows if transfer.is_read else ():
                actions += self.loads.block_stuck(row)
        for lane, rows in self.transfers.shed_unusable(now_ns):
            for row in rows:
                self.metrics.add(MISS_BLOCKS, tier=lane.tier.name, reason="fault")
                actions += self.loads.block_missed(row, Fate.TIER_DOWN, now_ns)
        self.prefetcher.advance(now_ns)
        self._demotion.advance(now_ns)
        self.flush.advance(now_ns)
        actions += self.drops.advance(now_ns)
        actions += self.transfers.pump(now_ns)
        return actions

    def next_deadline_ns(self) -> int | None:
        """Return when a ``Tick`` is due if no event comes earlier."""
        deadlines = [
            self.drops.next_deadline_ns(),
            self.transfers.next_deadline_ns(),
            self.pending_lookups.next_deadline_ns(),
            self.flush.next_deadline_ns(),
        ]
        deadlines += [
            lease.expires_ns if lease.is_ended else lease.deadline_ns
            for session in self.sessions.values()
            for lease in session.loads.values()
        ]
        return min((at for at in deadlines if at is not None), default=None)

    @property
    def num_pins(self) -> int:
        """Return the number of pins; 0 when the node is idle."""
        return self.cache.num_pins

    @property
    def num_leases(self) -> int:
        """Return the number of open leases."""
        return sum(len(s.loads) + len(s.stores) for s in self.sessions.values())

    def _all_reactions(self) -> dict[type, Callable[..., list[Action] | None]]:
        """Return the handler of each kind of event."""
        return {
            ev.Register: self._register,
            ev.Announce: self._in_session(self._announce),
            ev.Lookup: self._in_session(self._lookup),
            ev.Load: self._in_session(self._load),
            ev.Release: self._release,
            ev.PrepareStore: self._in_session(self._prepare_store),
            ev.CompleteStore: self._in_session(self._complete_store),
            ev.EngineTierReport: self._in_session(self._report),
            ev.SessionEnded: self._session_ended,
            ev.Drop: self._drop,
            ev.PinBlocks: self._pin,
            ev.Warm: self._warm,
            ev.ReadDone: self._completions.read,
            ev.WriteDone: self._completions.written,
            ev.ExistsQueryDone: self._exists_query_done,
            ev.PurgeDone: self.drops.purged,
            ev.BlocksLost: self._completions.lost,
            ev.MarkUnverified: self._admin_states.mark_unverified,
            ev.BlocksVerified: self._completions.verified,
            ev.TierUp: self._tier_up,
            ev.SetAdminState: self._set_admin_state,
            ev.ConfigureTier: self._admin_states.configure,
            ev.ForgetRows: self._admin_states.forget,
            ev.SetWriteAllowance: self.writes.set_allowance,
            ev.DaemonStopping: self.flush.close,
            ev.SettingsChanged: self._apply_settings,
            ev.SlabsReserved: self._slabs_reserved,
            ev.BlocksRecovered: self._recovered,
            ev.Tick: self._tick,
        }

    # Sessions

    def _in_session(self, react: Callable[..., list[Action]]) -> Callable[..., list[Action]]:
        """Return a handler that refuses unknown sessions and malformed chains."""

        def reaction(event: ev.SessionCall, now_ns: int) -> list[Action]:
            session = self.sessions.get(event.session)
            if session is None:
                return [_unknown_session(event.call)]
            if isinstance(event, ev.ChainCall):
                fault = chain_fault(event.hashes, event.tenant, event.first)
                if fault:
                    return [CallReply(event.call, Refused("chain", fault))]
            return react(event, session, now_ns)

        return reaction

    def _register(self, event: ev.Register, _now_ns: int) -> list[Action]:
        refusal = _refusal(event, self.cache.slots)
        if refusal:
            return [CallReply(event.call, Refused("registration", refusal))]
        if len(self.sessions) >= SESSIONS_MAX:
            full = f"{SESSIONS_MAX} engines are attached already"
            return [CallReply(event.call, Refused("too_many", full))]
        self._num_sessions += 1
        # Only the holder of the ticket can know the token, which authorizes all later calls.
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
            lease_ns=self._lease_ns,
            can_split=event.can_split,
            rank=event.rank,
        )
        if self.planner is not None:
            self.planner.note_flops(event.key_space, event.flops, token)
        self.writes.note_layout(event.key_space, event.layout)
        return [CallReply(event.call, Registration(token, self.boot, self._lease_ns))]

    def _report(self, event: ev.EngineTierReport, session: Session, now_ns: int) -> list[Action]:
        session.report = EngineReport(
            event.capacity_bytes, event.used_bytes, event.used_tokens, event.hit_tokens
        )
        session.load = event.load
        if event.order:
            self.drops.answered(session, event.order, event.removed, event.refusal)
        if self.planner is not None and event.steps:
            self.planner.note_steps(session.key_space, event.steps, now_ns, session.token)
        for outcome in event.outcomes:
            self.decisions.conclude(session, outcome, now_ns)
        return [CallReply(event.call, None)]

    def _session_ended(self, event: ev.SessionEnded, _now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for session in [s for s in self.sessions.values() if s.ticket == event.ticket]:
            del self.sessions[session.token]
            for number in list(session.loads):
                actions += self.loads.release(session, number, outcome="cancelled")[1]
            actions += self.stores.abandon(session)
            self.drops.session_ended(session.token)
            self.prefetcher.session_ended(session.token)
        return actions

    # Lookups and loads

    def _announce(self, event: ev.Announce, session: Session, now_ns: int) -> list[Action]:
        for each in event.requests:
            if fault := chain_fault(each.hashes, each.tenant, each.first):
                return [CallReply(event.call, Refused("chain", fault))]
        for each in event.requests:
            use = use_of(session, each.tenant, each.hashes, each.traits)
            # A request without an id counts at its lookup, if it needs one.
            if each.traits.request_id or each.first == len(use.keys):
                num_known = self.use_counter.count(session.token, use, 0, now_ns)
                self.writes.used(as_keys(each.hashes)[:num_known], now_ns)
            chain = PromptChain.of(
                Scope(session.key_space, each.tenant), each.hashes, session.layout.block_bytes
            )
            self.prefetcher.announce(session, use, chain, each.first, now_ns)
        for name in event.over:
            self.prefetcher.request_over(session.token, name)
        self.metrics.add(ANNOUNCED_REQUESTS, len(event.requests))
        return [CallReply(event.call, None)]

    def _lookup(self, event: ev.Lookup, session: Session, now_ns: int) -> list[Action]:
        chain = _chain_of(session, event)
        run = self.find(chain, event.first, now_ns)
        shared = self.transfers.shared_lane()
        is_open = run.reason == "absent" and not self.cache.is_closed(chain.scope)
        if shared is None or not is_open or has_repeats(event.hashes):
            return [self._found(event, session, chain, run, now_ns=now_ns)]
        query = self.pending_lookups.start(
            event,
            chain,
            event.first + len(run),
            session.layout.block_tokens,
            lane=shared,
            now_ns=now_ns,
        )
        if query is not None:
            return [query]
        return [self._found(event, session, chain, run, now_ns=now_ns)]

    def _exists_query_done(self, event: ev.ExistsQueryDone, now_ns: int) -> list[Action]:
        lookup = self.pending_lookups.end(event, now_ns)
        return [] if lookup is None else [self._answer(lookup, now_ns)]

    def _answer(self, lookup: PendingLookup, now_ns: int) -> CallReply:
        """Answer a lookup that waited from the index as it is now."""
        session = self.sessions.get(lookup.event.session)
        if session is None:
            return _unknown_session(lookup.event.call)
        run = self.find(lookup.chain, lookup.event.first, now_ns)
        return self._found(
            lookup.event, session, lookup.chain, run, is_late=lookup.is_late, now_ns=now_ns
        )

    def _load(self, event: ev.Load, session: Session, now_ns: int) -> list[Action]:
        chain = _chain_of(session, event)
        run = self.find(chain, event.first, now_ns)
        before = self.cache.index.find(chain.keys[: event.first if len(run) else 0])
        plan = self.decisions.plan_of(event, session)
        return self.loads.start(event, session, before[before >= 0], run, plan, now_ns=now_ns)

    def _release(self, event: ev.Release, _now_ns: int) -> list[Action]:
        session = self.sessions.get(event.session)
        released, actions = ReleaseResult(held=False), list[Action]()
        if session is not None:
            released, actions = self.loads.release(session, event.lease, event.corrupt)
        return actions if event.call is None else [*actions, CallReply(event.call, released)]

    def find(self, chain: PromptChain, first: int, now_ns: int) -> BlockRun:
        """Return the run of blocks from ``first`` on that can be loaded now. Changes nothing."""
        usable = {
            name
            for name, lane in self.transfers.lanes.items()
            if lane.is_usable(now_ns) and not lane.is_closed(chain.scope)
        }
        if self.cache.is_closed(chain.scope):
            usable.clear()  # every load goes through the CPU tier
        else:
            usable.add(TierName.CPU)
        run = find_run(self.cache.index, chain, first, frozenset(usable))
        return run.without(self.transfers.stuck())

    def _found(
        self,
        event: ev.Lookup,
        session: Session,
        chain: PromptChain,
        run: BlockRun,
        *,
        is_late: bool = False,
        now_ns: int,
    ) -> CallReply:
        use = use_of(session, event.tenant, event.hashes, event.traits)
        num_found = event.first + len(run)
        num_known = self.use_counter.count(session.token, use, num_found if len(run) else 0, now_ns)
        self.writes.used(chain.keys[:num_known], now_ns)
        if event.traits.request_id:
            self.prefetcher.request_over(session.token, event.traits.request_id)
        self.retention.keep_request(use, now_ns)
        missed = self.miss_fates.of_lookup(
            chain, num_found, run, num_known, is_late=is_late, now_ns=now_ns
        )
        depth_tokens = None if self.depth is None else self.depth.max_offload_tokens(use)
        found = self.decisions.decide(event, session, run, missed, depth_tokens, now_ns=now_ns)
        self.miss_fates.count(missed)
        num_asked = len(chain.keys) - event.first
        count_lookup(self.metrics, num_asked, run, found, session)
        return CallReply(event.call, replace(found, is_empty=self._is_empty(session.key_space)))

    def _is_empty(self, key_space: bytes) -> bool:
        """Return whether no tier has, or may have, a block of a key space."""
        return (
            self.transfers.shared_lane() is None
            and not self.cache.index.key_space_usage.has_blocks(key_space)
        )

    # Stores

    def _prepare_store(self, event: ev.PrepareStore, session: Session, now_ns: int) -> list[Action]:
        if has_repeats(event.hashes):
            return [CallReply(event.call, Refused("chain", "the chain contains a block twice"))]
        chain = _chain_of(session, event)
        use = use_of(session, event.tenant, event.hashes, event.traits, event.num_prompt_blocks)
        self.use_counter.store(session.token, use, now_ns)
        self.retention.keep_request(use, now_ns)
        return [
            CallReply(event.call, self.stores.prepare(session, chain, event.first, now_ns, use=use))
        ]

    def _complete_store(
        self, event: ev.CompleteStore, session: Session, now_ns: int
    ) -> list[Action]:
        rows, actions = self.stores.complete(session, event)
        session.counters.stored_tokens += len(rows) * session.layout.block_tokens
        if rows:
            self.writes.stored(rows, now_ns)
            self.flush.stored(rows, now_ns)
        return [CallReply(event.call, StoreResult(len(rows))), *actions]

    # Operators, tiers and time

    def _pin(self, event: ev.PinBlocks, now_ns: int) -> list[Action]:
        if fault := chain_fault(event.hashes, event.tenant, 0):
            return [CallReply(event.call, Refused("chain", fault))]
        return [CallReply(event.call, self.prefetcher.pin(event, now_ns))]

    def _warm(self, event: ev.Warm, now_ns: int) -> list[Action]:
        if fault := chain_fault(event.hashes, event.tenant, 0):
            return [CallReply(event.call, Refused("chain", fault))]
        return [CallReply(event.call, self.prefetcher.warm(event, now_ns))]

    def _apply_settings(self, event: ev.SettingsChanged, _now_ns: int) -> None:
        self._lease_ns = event.lease_ns
        self.retention.share = event.pin_share
        for tier in event.tiers:
            if tier.name in self.transfers.lanes:
                self.transfers.lanes[tier.name].tier = tier

    def _drop(self, event: ev.Drop, now_ns: int) -> list[Action]:
        actions = self.drops.start(event, now_ns)
        if any(tier is TierName.CPU or tier.is_shared for tier in event.tiers):
            interrupted = self.pending_lookups.interrupt(event.selection)
            actions += [self._answer(lookup, now_ns) for lookup in interrupted]
        return actions

    def _tier_up(self, event: ev.TierUp, _now_ns: int) -> None:
        self.transfers.lanes[event.tier].is_up = event.is_up
        self.feeds.begin()

    def _set_admin_state(self, event: ev.SetAdminState, now_ns: int) -> list[Action]:
        was_up = self._is_up(event.tier)
        actions = self._admin_states.change(event, now_ns)
        if event.admin_state is AdminState.DETACHED:
            self.drops.detached(event.tier)
        if event.tier.is_shared and event.admin_state is AdminState.DETACHED:
            interrupted = self.pending_lookups.interrupt(EVERYTHING)
            actions += [self._answer(lookup, now_ns) for lookup in interrupted]
        if self._is_up(event.tier) is not was_up:
            self.feeds.begin()
        return actions

    def _is_up(self, tier: TierName) -> bool:
        lane = self.transfers.lanes.get(tier)
        return lane is None or (
            lane.is_up and lane.admin_state in {AdminState.ACTIVE, AdminState.READ_ONLY}
        )

    def _slabs_reserved(self, event: ev.SlabsReserved, _now_ns: int) -> None:
        self.cache.slots.reserve(event.num_slabs)

    def _recovered(self, event: ev.BlocksRecovered, _now_ns: int) -> None:
        self._admin_states.recovered(event)
        if self._is_up(event.tier):
            self.feeds.begin()

    def _tick(self, _event: ev.Tick, now_ns: int) -> list[Action]:
        actions = self.loads.expire(self.sessions.values(), now_ns)
        late = self.pending_lookups.expire(now_ns)
        return actions + [self._answer(lookup, now_ns) for lookup in late]


def _refusal(event: ev.Register, slots: SlabAllocator) -> str:
    """Return why a registration is refused, or an empty string."""
    layout = event.layout
    if (layout.name, layout.version) not in KNOWN_LAYOUTS:
        return f"layout {layout.name!r} version {layout.version} is not known to this daemon"
    if len(event.key_space) != HASH_BYTES:
        return f"key_space has {len(event.key_space)} bytes, not {HASH_BYTES}"
    if layout.block_bytes > BLOCK_BYTES_MAX:
        return f"layout.block_bytes is {layout.block_bytes}; the maximum is {BLOCK_BYTES_MAX}"
    size, slab_bytes = slot_bytes(layout.block_bytes), slots.slab_bytes
    if size > slab_bytes:
        return f"a block takes {size} bytes and cpu.slab is {slab_bytes}; raise cpu.slab"
    # The share that a single engine may hold in stores must fit one block.
    least_bytes = int(size / STORE_ARENA_SHARE * (ENGINE_SHARE + 1) / ENGINE_SHARE)
    if least_bytes > slots.capacity_bytes:
        return f"a block takes {size} bytes; raise cpu.capacity to at least {least_bytes} bytes"
    return ""


def _unknown_session(call: int) -> CallReply:
    return CallReply(call, Refused("session", "unknown session; register again"))


def _chain_of(session: Session, event: ev.ChainCall) -> PromptChain:
    scope = Scope(session.key_space, event.tenant)
    return PromptChain.of(scope, event.hashes, session.layout.block_bytes)
