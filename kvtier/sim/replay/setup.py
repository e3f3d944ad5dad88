"""The setup of a replay: the simulated machine, policy, tier sizes and node configuration."""

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.config import Config, load_config
from kvtier.core.limits import ENGINE_SHARE, STORE_ARENA_SHARE
from kvtier.core.request import RequestTraits
from kvtier.errors import StartError
from kvtier.sim.replay.prefill import PrefillModel
from kvtier.sim.replay.trace import Trace, continuations

__all__ = [
    "CPU_BLOCKS_MIN",
    "Machine",
    "ReplayEngines",
    "ReplayLink",
    "ReplaySetup",
    "config_of",
    "load_machine",
    "traits_of",
    "with_hints",
]


_A100 = PrefillModel()
_Seconds = Annotated[float, Field(ge=0.0, le=3600.0)]
_Rate = Annotated[float, Field(ge=1e3, le=1e15)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ReplayLink(_Part):
    """A link that transfers one thing after another, each delivered a latency later."""

    read_bytes_per_s: _Rate = 25e9
    write_bytes_per_s: _Rate = 25e9
    latency_s: _Seconds = 100e-6


class ReplayEngines(_Part):
    """The engines of the machine."""

    count: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of engines; 0: one per request, so that no request waits for another."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=2**20)] = 2048
    """Tokens per step while the blocks of a prompt are loading."""
    call_s: _Seconds = 0.001
    """Seconds that a lookup takes to the daemon and back."""


class _Prefill(_Part):
    floor_s: _Seconds = _A100.floor_s
    token_s: Annotated[float, Field(ge=1e-12, le=3600.0)] = _A100.token_s
    attended_s: _Seconds = _A100.attended_s


class Machine(_Part):
    """A simulated machine. Defaults: an A100 with an 8B model, PCIe 4 and one NVMe drive."""

    token_bytes: Annotated[int, Field(ge=1, le=2**30)] = 128 * 1024
    """KV bytes per token: 32 layers, 8 KV heads of 128, two bytes each, keys and values."""
    engines: ReplayEngines = ReplayEngines()
    prefill: _Prefill = _Prefill()
    cpu: ReplayLink = ReplayLink()
    """Link between arena and engine."""
    ssd: ReplayLink = ReplayLink(read_bytes_per_s=6e9, write_bytes_per_s=3e9, latency_s=200e-6)

    @property
    def prefill_model(self) -> PrefillModel:
        """Return the compute times of its engines."""
        return PrefillModel(**self.prefill.model_dump())

    def with_prefill(self, model: PrefillModel) -> "Machine":
        """Return this machine with engines of another speed."""
        prefill = _Prefill(
            floor_s=model.floor_s, token_s=model.token_s, attended_s=model.attended_s
        )
        return self.model_copy(update={"prefill": prefill})


def load_machine(path: Path | None) -> Machine:
    """Return the machine of a TOML file, or the default one. Raises StartError for a bad file."""
    if path is None:
        return Machine()
    try:
        given: Mapping[str, Any] = tomllib.loads(path.read_text())
        return Machine.model_validate(_floats(given))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "machine"
        raise StartError(f"{path}: {field}", first["msg"].lower(), "see docs/replay.md") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(str(path), f"cannot be read: {reason}", "give a TOML file") from error


def _floats(given: Mapping[str, Any]) -> dict[str, Any]:
    """Accept whole numbers as seconds and rates."""
    return {
        name: _floats(value)
        if isinstance(value, dict)
        else float(value)
        if name.endswith("_s") and isinstance(value, int) and not isinstance(value, bool)
        else value
        for name, value in given.items()
    }


CPU_BLOCKS_MIN = math.ceil((ENGINE_SHARE + 1) / ENGINE_SHARE / STORE_ARENA_SHARE)
"""A node accepts no engine if its arena share for stores has no room for one block."""

_INSTANT: Mapping[str, str] = {
    "cost.restore": "always",
    "policy.max_offload_tokens": str(2**31 - 1),
    "ssd.flush_after": "0s",
}
"""Overrides for a replay without time, which compares only what is kept: not whether restoring
pays, how much of a prompt to store, or what a crash would lose.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """One run of a trace."""

    policy: str
    """Eviction policy; empty: that of the configuration."""
    cpu_blocks: int
    ssd_blocks: int = 0
    is_instant: bool = False
    """Nothing takes time, and all blocks of a prompt are resident at its arrival."""
    machine: Machine = field(default_factory=Machine)
    config: Path | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Values for keys of the node's configuration."""

    @property
    def name(self) -> str:
        """Return a short name."""
        return f"{self.policy} {self.cpu_blocks}" + f"+{self.ssd_blocks}" * bool(self.ssd_blocks)


def config_of(setup: ReplaySetup) -> Config:
    """Return the node's configuration: that of the file with the overrides of the setup."""
    named = {"policy.eviction": setup.policy} if setup.policy else {}
    plain = _INSTANT if setup.is_instant else {}
    return load_config(setup.config, {**plain, **setup.overrides, **named}, {})


def with_hints(trace: Trace, right_share: float, seed: int = 0) -> Trace:
    """Return the trace with a hint at each request, right for this share of them.

    The hint says whether the chain continues within ten minutes. The seed alone decides which hints
    are wrong.
    """

    def is_right(number: int) -> bool:
        digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < right_share * 2**64

    requests = tuple(
        replace(request, continues=float(truth == is_right(number)))
        for number, (request, truth) in enumerate(
            zip(trace.requests, continuations(trace), strict=True)
        )
    )
    return replace(trace, requests=requests)


def traits_of(trace: Trace, number: int) -> RequestTraits:
    """Return the traits of a request."""
    request = trace.requests[number]
    return RequestTraits(
        request_id=str(number),
        num_tokens=request.num_tokens,
        kind=request.kind,
        continues=request.continues,
        gap_s=request.gap_s,
    )
