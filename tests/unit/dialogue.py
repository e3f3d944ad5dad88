"""Starting points for dialogues with a node: a harness, an engine, and the names of the tiers."""

from kvtier.core.identity import EVERYTHING, Selection
from kvtier.core.residency import Residency, TierName
from kvtier.node.messages import events as ev
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.node_harness import HarnessSettings, NodeHarness
from kvtier.tiers.base import Tier
from kvtier.tiers.memory import MemoryTier

MS = 1_000_000
CPU, SSD, REMOTE, GPU = TierName.CPU, TierName.SSD, TierName.REMOTE, TierName.GPU


def open_harness(
    *tiers: TierName, slots: int = 16, slabs: int = 1, workers: int = 2
) -> NodeHarness:
    """Return a harness with room for ``slots`` blocks of up to 4 KiB and these slower tiers."""
    slow: dict[TierName, Tier] = {name: MemoryTier(1 << 20, name=name) for name in tiers}
    settings = HarnessSettings(
        num_slabs=slabs, slab_bytes=slots // slabs * 4096, num_workers=workers
    )
    return NodeHarness(slow, settings)


def engine_on(harness: NodeHarness, name: str = "engine", payload_bytes: int = 3000) -> FakeEngine:
    space = f"{payload_bytes:016}".encode()
    engine = FakeEngine(name, key_space=space, payload_bytes=payload_bytes)
    engine.attach(harness)
    return engine


def drop(
    harness: NodeHarness,
    *tiers: TierName,
    selection: Selection = EVERYTHING,
    within_ns: int = 1000 * MS,
) -> int:
    """Take a selection out of tiers; the answer to this call may come later."""
    deadline_ns = harness.clock() + within_ns
    return harness.call(lambda call: ev.Drop(call, tiers, deadline_ns, selection))


def metric(harness: NodeHarness, name: str, **labels: str) -> float | None:
    return harness.metrics.registry.get_sample_value(name, labels)


def rows_of(harness: NodeHarness, tier: TierName, selection: Selection = EVERYTHING) -> int:
    """How many blocks of a selection are in a tier, in whatever state."""
    index = harness.node.cache.index
    rows = index.selected(index.rows(), selection)
    return int((index.residency(rows, tier) != Residency.ABSENT).sum())


def empty_cpu(harness: NodeHarness) -> None:
    """Evict what can be evicted, as an operator's drop does."""
    harness.node.cache.evict_all(EVERYTHING)
