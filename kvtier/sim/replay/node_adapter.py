"""Runs a node in a replay: passes calls to it, returns its answers, and simulates its tiers.

It replaces the asyncio driver of production, with a clock that the trace moves.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

from prometheus_client import CollectorRegistry

from kvtier.config import Config
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash
from kvtier.core.layout import KVLayout
from kvtier.core.reuse.history import History
from kvtier.core.slots import slot_bytes
from kvtier.core.slow_tier import SlowTier
from kvtier.core.tier_registry import STORE_TIER
from kvtier.daemon.policies import Policies, policies
from kvtier.node.messages import actions as ac
from kvtier.node.messages import events as ev
from kvtier.node.messages.actions import TransferBlock
from kvtier.node.node import Node, NodeSettings
from kvtier.observe.daemon_metrics import DAEMON_METRICS
from kvtier.observe.metrics import Metrics
from kvtier.sim.replay.setup import ReplaySetup, config_of
from kvtier.tiers.base import MissReason, WriteOutcome
from kvtier.tiers.ssd.settings import ssd_settings

__all__ = ["NodeAdapter", "SsdModel", "TransferTimer", "completion"]


class SsdModel:
    """A simulated SSD tier of ``num_blocks`` blocks, without their bytes.

    When it is full it evicts the least valuable blocks of the history, or the least recently used
    ones without a history. By recency, a parent is younger than its child as long as ``touch`` is
    called for each use.
    """

    def __init__(self, num_blocks: int, history: History | None) -> None:
        self._num_blocks = num_blocks
        self._history = history
        self._blocks: dict[BlockHash, int] = {}
        """Size of each block, least recently used first."""
        self.num_written = 0
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def touch(self, chain: Sequence[BlockHash]) -> None:
        """Note a use of a chain."""
        for block in reversed(chain):
            size = self._blocks.pop(block, None)
            if size is not None:
                self._blocks[block] = size

    def read(self, blocks: Sequence[TransferBlock]) -> tuple[bytes | MissReason, ...]:
        """Return a checksum for each stored block."""
        here = [block.header.block_hash in self._blocks for block in blocks]
        self.num_read += sum(here)
        return tuple(bytes(16) if is_here else MissReason.ABSENT for is_here in here)

    def write(self, blocks: Sequence[TransferBlock]) -> tuple[tuple[WriteOutcome, ...], bytes]:
        """Store blocks; return the outcome of each, and the hashes of evicted blocks."""
        named = {block.header.block_hash for block in blocks}
        for block in blocks:
            self._blocks.pop(block.header.block_hash, None)
            self._blocks[block.header.block_hash] = block.header.payload_bytes
        self.num_written += len(blocks)
        evicted: list[BlockHash] = []
        num_over = len(self._blocks) - self._num_blocks
        if num_over > 0:
            evicted = self._victims(blocks[0].header.payload_bytes, named, num_over)
            for victim in evicted:
                del self._blocks[victim]
        return (WriteOutcome.STORED,) * len(blocks), b"".join(evicted)

    def _victims(self, size: int, named: set[BlockHash], count: int) -> list[BlockHash]:
        """Return the least valuable blocks, except those being written."""
        history = self._history
        if history is None:
            order = iter(block for block in self._blocks if block not in named)
            return [*islice(order, count)]
        found: list[BlockHash] = []
        for each in history.queues.victims(STORE_TIER, size, named.__contains__):
            found.append(BlockHash(each))
            # Then its parent may be next. The node reports the eviction again, without effect.
            history.leave(STORE_TIER, [each], Fate.EVICTED)
            if len(found) == count:
                break
        return found


_SPACE = b"a replayed trace"


class TransferTimer(Protocol):
    """Decides when a transfer takes effect and when its end is reported."""

    def schedule(self, work: ac.Read | ac.Write, adapter: "NodeAdapter") -> None:
        """Call ``adapter.finish(work)`` now or later."""


class NodeAdapter:
    """A node under replay: ``ask`` for calls answered at once, ``listen`` for loads."""

    def __init__(
        self, setup: ReplaySetup, block_tokens: int, timer: TransferTimer, clock: Callable[[], int]
    ) -> None:
        config = config_of(setup)
        self.policies = policies(config)
        self.block_bytes = setup.machine.token_bytes * block_tokens
        self.busy_s = 0.0
        """Real seconds that the node took to handle events; exact only if nothing else runs."""
        self.decisions_s: list[float] = []
        """The part of each lookup, in which the node decides."""
        self._clock = clock
        self._timer = timer
        self._block_tokens = block_tokens
        self._num_calls = 0
        self._answers: dict[int, ac.Answer] = {}
        self._listeners: dict[int, Callable[[ac.LoadUpdate], None]] = {}
        self._queued: deque[ac.Action] = deque()
        self._is_dispatching = False
        settings = ssd_settings(config)
        policy = EVICTION_POLICIES[settings.eviction_policy(config.policy.eviction)]
        history = self.policies.history if policy.is_ranked else None
        self.ssd = SsdModel(setup.ssd_blocks, history)
        self.metrics = Metrics(DAEMON_METRICS, CollectorRegistry())
        self.node = _node(setup, config, self.policies, self.block_bytes, self.metrics)
        self.post(ev.SlabsReserved(1))

    def register(self, name: str) -> str:
        """Register an engine and return its session."""
        layout = KVLayout("paged", 1, self._block_tokens, self.block_bytes, "bfloat16", "replay")
        registered = self.ask(
            lambda call: ev.Register(call, name, _SPACE, layout, name, "shm", 1, can_split=True)
        )
        assert isinstance(registered, ac.Registration), registered
        return registered.session

    def ask(self, make: Callable[[int], ev.Event]) -> ac.Answer:
        """Make a call that is answered at once."""
        self._num_calls += 1
        number = self._num_calls
        self.post(make(number))
        return self._answers.pop(number)

    def listen(self, load: ev.Load, listener: Callable[[ac.LoadUpdate], None]) -> ac.Answer:
        """Start a load with updates; return the refusal if it is refused."""
        self._num_calls += 1
        number = self._num_calls
        self._listeners[number] = listener
        self.post(replace(load, call=number))
        return self._answers.pop(number, None)

    def post(self, event: ev.Event) -> None:
        """Let the node handle an event, and carry out its actions."""
        began_s = time.thread_time()
        actions = self.node.handle(event, self._clock())
        seconds = time.thread_time() - began_s
        self.busy_s += seconds
        if isinstance(event, ev.Lookup):
            self.decisions_s.append(seconds)
        self._queued.extend(actions)
        if self._is_dispatching:
            return  # the outer call continues with these
        self._is_dispatching = True
        try:
            while self._queued:
                self._dispatch(self._queued.popleft())
        finally:
            self._is_dispatching = False

    def gate_counts(self) -> tuple[int, int]:
        """Return how many blocks the SSD gate has judged and how many it admitted."""
        gate = self.policies.admission.gates.get(STORE_TIER)
        return (gate.num_offered, gate.num_taken) if gate is not None else (0, 0)

    def finish(self, work: ac.Read | ac.Write, seconds: float) -> None:
        """Let a transfer take effect and notify the node."""
        self.post(completion(work, self.ssd, seconds))

    def _dispatch(self, action: ac.Action) -> None:
        match action:
            case ac.CallReply():
                self._answers[action.call] = action.answer
            case ac.LoadUpdate():
                listener = self._listeners[action.call]
                if action.end:
                    del self._listeners[action.call]
                listener(action)
            case ac.Read() | ac.Write():
                self._timer.schedule(action, self)
            case _:
                raise AssertionError(f"unexpected action {action}")


def completion(work: ac.Read | ac.Write, ssd: SsdModel, seconds: float) -> ev.Event:
    """Carry out a transfer and return the event for the node."""
    if isinstance(work, ac.Read):
        return ev.ReadDone(work.transfer, ssd.read(work.blocks), seconds)
    outcomes, evicted = ssd.write(work.blocks)
    return ev.WriteDone(work.transfer, outcomes, evicted, seconds)


def _node(
    setup: ReplaySetup, config: Config, chosen: Policies, block_bytes: int, metrics: Metrics
) -> Node:
    """Return a node whose arena holds exactly this many blocks, in one slab."""
    settings = ssd_settings(config)
    tiers = (
        SlowTier(
            STORE_TIER,
            settings.io_threads,
            settings.deadline_ns,
            queue_bytes_max=slot_bytes(block_bytes) * setup.cpu_blocks,
            write=settings.write_mode,
            flush_after_ns=settings.flush_after_ns,
        ),
    )
    return Node(
        NodeSettings(
            boot="replay",
            num_slabs=1,
            slab_bytes=slot_bytes(block_bytes) * setup.cpu_blocks,
            lease_ns=config.daemon.lease_ns,
            pin_share=config.policy.pin_share,
            tiers=tiers if setup.ssd_blocks else (),
        ),
        chosen.eviction,
        chosen.admission,
        metrics,
        history=chosen.history,
        planner=chosen.planner,
        depth=chosen.depth,
    )
