"""One request's question to the daemon: what it has of a prompt, held in place until it is copied.

A search runs on a thread of its own. It asks what can be loaded, has the daemon bring up as much of
it as the plan says, and keeps the lease of the load open: what it then names lies verified in the
arena, and stays there until ``release`` or ``good_until_s``.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvtier.client import Client, LoadedBlock
from kvtier.core.cost.sample import EngineLoad
from kvtier.core.identity import BlockHash
from kvtier.core.residency import TierName
from kvtier.core.traits import Traits
from kvtier.errors import DaemonUnavailable

__all__ = ["Search"]

_TRIES = 2
"""A load that ended early has let go of what it had: that much is asked for once more."""

_WAIT_SHARE = 1.2
_WAIT_MARGIN_S = 0.05
"""The daemon ends a load by its plan, and we do so a fifth and this much later."""


@dataclass(slots=True)
class Search:
    """Begin with ``run``; all else may be read once ``is_over``."""

    client: Client
    tenant: bytes
    hashes: Sequence[BlockHash]
    first: int
    traits: Traits
    load: EngineLoad
    is_over: bool = False
    is_unwanted: bool = False
    tiers: list[TierName] = field(default_factory=list)
    """Of the blocks that are held, from the first one on."""
    decision: int = 0
    good_until_s: float = 0.0
    max_offload_tokens: int | None = None
    began_s: float = field(default_factory=time.monotonic)
    _held: Generator[LoadedBlock | str] | None = None

    def run(self) -> None:
        """Ask, and hold what is found. Ends by the client's deadlines."""
        try:
            self._run()
        except DaemonUnavailable:
            self.tiers.clear()  # the client has said so, and vLLM computes
        finally:
            self.is_over = True
            if self.is_unwanted:
                self.release()

    def release(self) -> None:
        """Let go of what is held; it waits for the daemon a little, so not in a step."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def _run(self) -> None:
        found = self.client.lookup(self.tenant, self.hashes, self.first, self.traits, self.load)
        self.max_offload_tokens = found.max_offload_tokens
        wanted, wait_s = len(found.tiers), self.client.deadlines.load_s
        if found.plan is not None:
            wanted = min(wanted, found.plan.num_blocks)
            self.decision = found.plan.decision
            if found.plan.wait_ns:
                wait_s = min(wait_s, _WAIT_SHARE * found.plan.wait_ns / 1e9 + _WAIT_MARGIN_S)
        for _ in range(_TRIES):
            if not wanted or self.is_unwanted:
                return
            self._hold(wanted, wait_s)
            if len(self.tiers) == wanted:
                return
            wanted = len(self.tiers)
        self.tiers.clear()

    def _hold(self, wanted: int, wait_s: float) -> None:
        """Have ``wanted`` blocks brought up, and stop before the load ends, which keeps them."""
        self.tiers.clear()
        items = self.client.load(
            self.tenant,
            self.hashes[: self.first + wanted],
            self.first,
            decision=self.decision,
            timeout_s=wait_s,
        )
        for item in items:
            if not isinstance(item, LoadedBlock):
                return
            self.tiers.append(item.tier)
            self.good_until_s = item.good_until_s
            if len(self.tiers) == wanted:
                self._held = cast("Generator[LoadedBlock | str]", items)
                return
