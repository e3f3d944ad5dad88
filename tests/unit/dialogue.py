"""What the dialogues with a node begin with: a stage, an engine, and the names of the tiers."""

from kvtier.core.identity import EVERYTHING
from kvtier.core.residency import TierName
from kvtier.testing.fake_engine import FakeEngine
from kvtier.testing.stage import Stage, StageSettings
from kvtier.tiers.base import Tier
from kvtier.tiers.memory import MemoryTier

MS = 1_000_000
CPU, SSD, REMOTE, GPU = TierName.CPU, TierName.SSD, TierName.REMOTE, TierName.GPU


def open_stage(*tiers: TierName, slots: int = 16, slabs: int = 1, workers: int = 2) -> Stage:
    """A stage with room for ``slots`` blocks of up to 4 KiB, and with these slower tiers."""
    slow: dict[TierName, Tier] = {name: MemoryTier(1 << 20, name=name) for name in tiers}
    settings = StageSettings(num_slabs=slabs, slab_bytes=slots // slabs * 4096, num_workers=workers)
    return Stage(slow, settings)


def engine_on(stage: Stage, name: str = "engine", payload_bytes: int = 3000) -> FakeEngine:
    space = f"{payload_bytes:016}".encode()
    engine = FakeEngine(name, key_space=space, payload_bytes=payload_bytes)
    engine.attach(stage)
    return engine


def empty_cpu(stage: Stage) -> None:
    """Evict what can be evicted, as an operator's drop does."""
    stage.node.cache.evict_all(EVERYTHING)
