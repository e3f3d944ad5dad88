"""One request's question to the daemon: how many of its next blocks should be loaded."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.client import Client
from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.request import RequestTraits
from kvtier.errors import DaemonUnavailable

__all__ = ["LookupQuestion"]

_WAIT_SHARE = 1.2
_WAIT_MARGIN_S = 0.05
"""The daemon ends a load by its plan, and we do so a fifth and this much later."""

_QUEUE_S = 0.75
"""A lookup has a deadline of the client's; this much more may pass until its turn has come."""


@dataclass(slots=True)
class LookupQuestion:
    """``ask`` runs on a thread; all else may be read once ``is_over``."""

    client: Client
    hashes: Sequence[BlockHash]
    first: int
    traits: RequestTraits
    num_found: int = 0
    """Blocks from ``first`` on that the daemon has and advises to load."""
    decision: int = 0
    wait_s: float = 0.0
    asked_s: float = field(default_factory=time.monotonic)
    _is_answered: bool = False

    def ask(self) -> None:
        """Ask; ends by the client's deadline, and without an answer nothing is found."""
        try:
            if not self.is_over:
                self._ask()
        except DaemonUnavailable:
            pass  # the client has said so, and vLLM computes
        finally:
            self._is_answered = True

    @property
    def is_over(self) -> bool:
        """Tell whether there is an answer, or its time is up."""
        ends_s = self.asked_s + self.client.deadlines.lookup_s + _QUEUE_S
        return self._is_answered or time.monotonic() > ends_s

    def _ask(self) -> None:
        found = self.client.lookup(NO_TENANT, self.hashes, self.first, self.traits)
        num_found, wait_s = len(found.tiers), self.client.deadlines.load_s
        if found.plan is not None:
            num_found = min(num_found, found.plan.num_blocks)
            self.decision = found.plan.decision
            if found.plan.wait_ns:
                wait_s = min(wait_s, _WAIT_SHARE * found.plan.wait_ns / 1e9 + _WAIT_MARGIN_S)
        self.wait_s = wait_s
        self.num_found = num_found
