"""What one replay is about: a policy, the sizes of the tiers, and the node's configuration."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtier.config import Config, load_config
from kvtier.core.limits import ENGINE_SHARE, STORE_ARENA_SHARE
from kvtier.core.traits import Traits
from kvtier.sim.replay.future import truths
from kvtier.sim.replay.machine import Machine
from kvtier.sim.replay.trace import Trace

__all__ = ["CPU_BLOCKS_MIN", "Setup", "config_of", "hinted", "traits_of"]

CPU_BLOCKS_MIN = math.ceil((ENGINE_SHARE + 1) / ENGINE_SHARE / STORE_ARENA_SHARE)
"""A node takes no engine whose stores would not have room for one block."""

_INSTANT: Mapping[str, str] = {
    "cost.restore": "always",
    "policy.max_offload_tokens": str(2**31 - 1),
    "ssd.flush_after": "0s",
}
"""Without time what is kept is to be seen: neither whether it pays, nor how deep, nor what a crash
would take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run of a trace."""

    policy: str
    """Empty: the configuration's."""
    cpu_blocks: int
    ssd_blocks: int = 0
    is_instant: bool = False
    """Nothing takes time, and all of a prompt's blocks are resident at its arrival."""
    machine: Machine = field(default_factory=Machine)
    config: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Keys of the node's configuration."""

    @property
    def name(self) -> str:
        """Return a short name of it."""
        return f"{self.policy} {self.cpu_blocks}" + f"+{self.ssd_blocks}" * bool(self.ssd_blocks)


def config_of(setup: Setup) -> Config:
    """Return the configuration of the node: the file's, and what the setup says above it."""
    named = {"policy.eviction": setup.policy} if setup.policy else {}
    plain = _INSTANT if setup.is_instant else {}
    return load_config(setup.config, {**plain, **setup.overrides, **named}, {})


def hinted(trace: Trace, right_share: float, seed: int = 0) -> Trace:
    """Return the trace with a hint at each request, right for this share of them.

    The hint says whether the chain goes on within ten minutes. Which ones are wrong follows from
    the seed alone.
    """

    def is_right(number: int) -> bool:
        digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < right_share * 2**64

    requests = tuple(
        replace(request, continues=float(truth == is_right(number)))
        for number, (request, truth) in enumerate(zip(trace.requests, truths(trace), strict=True))
    )
    return replace(trace, requests=requests)


def traits_of(trace: Trace, number: int) -> Traits:
    """Return what a request says of itself."""
    request = trace.requests[number]
    return Traits(
        request_id=str(number),
        num_tokens=request.num_tokens,
        kind=request.kind,
        continues=request.continues,
        gap_s=request.gap_s,
    )
