"""What vLLM has to do: by that the daemon knows how long a request would wait for its turn."""

from collections.abc import Mapping

from kvtier.connectors.vllm.tracked import Tracked
from kvtier.core.plan import EngineLoad

__all__ = ["Backlog"]


class Backlog:
    """Of the requests that are ``tracked``, by name; counted once for a step."""

    def __init__(self, tracked: Mapping[str, Tracked]) -> None:
        self._tracked = tracked
        self._total: EngineLoad | None = None

    def load(self, but: Tracked | None = None) -> EngineLoad:
        """Return what vLLM has to do, besides one request; what it had when the step began."""
        if self._total is None:
            lefts = [tracked.num_left for tracked in self._tracked.values()]
            self._total = EngineLoad(sum(lefts), lefts.count(0))
        if but is None:
            return self._total
        return EngineLoad(
            max(0, self._total.waiting_tokens - but.num_left), self._total.num_running
        )

    def end_step(self) -> None:
        """Have it counted anew."""
        self._total = None
