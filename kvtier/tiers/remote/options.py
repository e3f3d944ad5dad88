"""RemoteOptions: how a remote tier keeps blocks, besides where."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import StartError
from kvtier.tiers.seal import Seal, SealMode

__all__ = ["RemoteOptions"]


def _unsealed() -> Seal:
    return Seal(SealMode.OFF, None, "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """What may be set; named as in the configuration."""

    key_prefix: str = "kvtier:"
    ttl_s: float = 86_400
    timeout_s: float = 0.25
    """How long a server may be silent, and a connection take."""
    num_workers: int = 4
    """Connections to each server."""
    value_bytes: int = 1 << 20
    """Payload of one value; the first of a block has its head besides."""
    max_age_s: float = 0
    """0: no limit."""
    tls_ca: Path | None = None
    seal: Seal = field(default_factory=_unsealed)
    now_s: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.ttl_s < 0.001:
            raise StartError("remote.ttl", f"{self.ttl_s} s is no time to live", "set 1ms or more")
        if {"{", "}"} & set(self.key_prefix):
            raise StartError(
                "remote.key_prefix", "it has a brace, which chooses slots", "leave braces away"
            )
