"""Replays a trace without time, to compare only which blocks a policy keeps.

All full blocks of a request are resident at its arrival, a hit is a block of the leading run, and
the partial last block never counts. Papers compare eviction policies this way, and the targets here
are stated this way. Everything still goes through the node, with tiers and engines that take no
time but report what they would have taken.
"""

from collections.abc import Callable

from kvtier.core.identity import HASH_BYTES, split_hashes
from kvtier.core.plan import PlanOutcome, StepSample
from kvtier.core.residency import TierName
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.sim.replay.node_adapter import NodeAdapter
from kvtier.sim.replay.results import ReplayRun, RequestResult
from kvtier.sim.replay.setup import ReplayLink, ReplaySetup, traits_of
from kvtier.sim.replay.trace import Trace

__all__ = ["replay_instant"]

_REPORT_NS = 10**9
_FAR_NS = 1 << 62


class _InstantTimer:
    """A ``TransferTimer`` for tiers that take no time."""

    def __init__(self, link: ReplayLink) -> None:
        self._link = link

    def schedule(self, work: ac.Read | ac.Write, adapter: NodeAdapter) -> None:
        """Finish the transfer now and report the time it would have taken."""
        is_read = isinstance(work, ac.Read)
        rate = self._link.read_bytes_per_s if is_read else self._link.write_bytes_per_s
        num_bytes = len(work.blocks) * adapter.block_bytes
        adapter.finish(work, self._link.latency_s + num_bytes / rate)


def replay_instant(
    trace: Trace, setup: ReplaySetup, on_progress: Callable[[int], None] = lambda _: None
) -> ReplayRun:
    """Replay a trace; ``on_progress`` is called with the number of finished requests."""
    return _Instant(trace, setup).run(on_progress)


class _Instant:
    def __init__(self, trace: Trace, setup: ReplaySetup) -> None:
        self._trace = trace
        self._setup = setup
        self._prefill = setup.machine.prefill_model
        self._now_ns = 0
        timer = _InstantTimer(setup.machine.ssd)
        self._adapter = NodeAdapter(setup, trace.block_tokens, timer, lambda: self._now_ns)
        self._session = self._adapter.register("replay")
        self._steps: list[StepSample] = []
        self._outcomes: list[PlanOutcome] = []
        self._reported_ns = 0

    def run(self, on_progress: Callable[[int], None]) -> ReplayRun:
        records: list[RequestResult] = []
        half_ns, half = self._trace.requests[-1].at_ns / 2, (0, 0)
        for number, request in enumerate(self._trace.requests):
            if request.at_ns < half_ns:
                half = self._adapter.gate_counts()
            self._now_ns = request.at_ns
            self._report()
            hits = self._serve(number) if len(request.blocks) else {}
            tokens = {tier: count * self._trace.block_tokens for tier, count in hits.items()}
            num_past = sum(tokens.values())
            seconds = self._prefill.seconds(request.num_tokens - num_past, num_past)
            records.append(
                RequestResult(
                    at_ns=request.at_ns,
                    num_tokens=request.num_tokens,
                    hit_tokens=tokens,
                    ttft_s=seconds,
                    cold_s=self._prefill.seconds(request.num_tokens, 0),
                )
            )
            self._steps.append(self._prefill.sample(request.num_tokens - num_past, num_past))
            on_progress(number + 1)
        return ReplayRun.of(self._setup, records, self._adapter, half)

    def _serve(self, number: int) -> dict[TierName, int]:
        """Look up, load blocks below the CPU tier, and store. Returns the found blocks by tier."""
        trace, adapter, session = self._trace, self._adapter, self._session
        request, traits = trace.requests[number], traits_of(trace, number)
        hashes = trace.hashes(request.blocks)
        if self._setup.ssd_blocks:
            adapter.ssd.touch(split_hashes(hashes))
        found = adapter.ask(
            lambda call: ev.Lookup(call, session, request.tenant, hashes, 0, _FAR_NS, traits)
        )
        assert isinstance(found, ac.LookupResult), found
        hits: dict[TierName, int] = {}
        for tier, length in found.runs:
            hits[tier] = hits.get(tier, 0) + length
        num_hits = found.num_blocks
        if num_hits:
            self._load(request.tenant, hashes[: HASH_BYTES * num_hits])
            self._note_outcome(found, hits)
        self._store(number, hashes, num_hits)
        return hits

    def _load(self, tenant: bytes, hashes: bytes) -> None:
        adapter, session, last = self._adapter, self._session, list[ac.LoadUpdate]()
        adapter.listen(ev.Load(0, session, tenant, hashes, 0, _FAR_NS), last.append)
        assert last[-1].end, "without time, loads end at once"
        adapter.ask(lambda call: ev.Release(call, session, last[-1].lease))

    def _note_outcome(self, found: ac.LookupResult, hits: dict[TierName, int]) -> None:
        """Report the time that the load would have taken."""
        if found.plan is None:
            return
        link, num_bytes = self._setup.machine.cpu, found.num_blocks * self._adapter.block_bytes
        seconds = link.latency_s + num_bytes / link.read_bytes_per_s
        self._outcomes.append(
            PlanOutcome(
                found.plan.decision, tuple(sorted(hits.items())), seconds, 0, 0.0, 0.0, seconds
            )
        )

    def _store(self, number: int, hashes: bytes, first: int) -> None:
        """Store the missing blocks; repeat for the rest while the node throttles."""
        while first < len(hashes) // HASH_BYTES:
            granted = self._prepare(number, hashes, first)
            if not granted.lease:
                return
            self._complete(granted)
            if not granted.rejected_blocks or granted.reason != "throttled":
                return
            first = granted.indexes[-1] + 1

    def _prepare(self, number: int, hashes: bytes, first: int) -> ac.StoreGrant:
        tenant, traits = self._trace.requests[number].tenant, traits_of(self._trace, number)
        session = self._session
        granted = self._adapter.ask(
            lambda call: ev.PrepareStore(call, session, tenant, hashes, first, traits)
        )
        assert isinstance(granted, ac.StoreGrant), granted
        return granted

    def _complete(self, granted: ac.StoreGrant) -> None:
        session, checksums = self._session, (bytes(16),) * len(granted.indexes)
        self._adapter.ask(lambda call: ev.CompleteStore(call, session, granted.lease, checksums))

    def _report(self) -> None:
        """Report step times to the node once a second."""
        if not self._steps or self._now_ns - self._reported_ns < _REPORT_NS:
            return
        steps, outcomes, session = tuple(self._steps), tuple(self._outcomes), self._session
        self._adapter.ask(
            lambda call: ev.EngineTierReport(
                call, session, 0, 0, 0, 0, steps=steps, outcomes=outcomes
            )
        )
        self._steps.clear()
        self._outcomes.clear()
        self._reported_ns = self._now_ns
