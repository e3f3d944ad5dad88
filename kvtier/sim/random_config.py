"""Draws the configuration of a run at random, and creates its policies as the daemon does."""

import random
from collections.abc import Sequence
from typing import Literal

from kvtier.config import Config
from kvtier.config.model import CostConfig, PolicyConfig, tier_sections
from kvtier.config.tiers import TierSection
from kvtier.core.eviction import EVICTION_POLICIES
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.core.slow_tier import WriteMode
from kvtier.daemon.policies import policies

__all__ = ["draw_config", "policies", "write_modes"]

_MS = 1_000_000
_EVICTIONS = tuple(EVICTION_POLICIES)
_WRITES: Sequence[Literal["demote", "second_use", "store"]] = (
    *("demote",) * 2,
    "second_use",
    *("store",) * 2,
)
_RESTORES: Sequence[Literal["auto", "always", "never"]] = (
    *("auto",) * 4,
    *("always",) * 2,
    "never",
)
_MOST_TOKENS: Sequence[Literal["auto"] | int] = (*("auto",) * 6, 0, 640)
_GATES = (0.0, 0.5, 1.0, 1.0)


def draw_config(draw: random.Random) -> Config:
    """Choose the configuration of a run."""
    return Config(
        policy=PolicyConfig(
            eviction=draw.choice(_EVICTIONS),
            max_offload_tokens=draw.choice(_MOST_TOKENS),
            pin_share=draw.choice((0.0, 0.1, 0.25, 0.5)),
        ),
        cost=CostConfig(
            restore=draw.choice(_RESTORES),
            split=draw.random() < 0.7,
            guard=draw.random() < 0.7,
            wait_max_ns=draw.choice((10, 50, 5000)) * _MS,
        ),
        tiers={name: _draw_section(draw, name) for name in SLOW_TIERS},
    )


def write_modes(config: Config) -> dict[TierName, WriteMode]:
    """Return when blocks are written to each slower tier."""
    return {name: section.write_mode for name, section in config.tiers.items()}


def _draw_section(draw: random.Random, name: TierName) -> TierSection:
    keys = {"write": draw.choice(_WRITES), "gate": draw.choice(_GATES)}
    if not name.is_shared:
        keys["flush_after_ns"] = draw.choice((0, 100, 1000)) * _MS
    return tier_sections()[name].model_validate(keys)
