"""Counts each request as one use of its chain, however often the node sees it.

A request is announced, looked up, perhaps looked up again after preemption, and its blocks are
offered in pieces. Counting each of these would teach the history that everything is reused.
"""

from kvtier.core.identity import split_hashes
from kvtier.core.limits import USE_KEPT_NS, USES_MAX
from kvtier.core.request import RequestTraits
from kvtier.core.reuse.depth import DepthCurves
from kvtier.core.reuse.history import History, Use
from kvtier.node.state.residency_listener import ResidencyListener
from kvtier.node.state.session import Session

__all__ = ["UseCounter", "use_of"]


def use_of(
    session: Session,
    tenant: bytes,
    hashes: bytes,
    traits: RequestTraits,
    num_prompt_blocks: int = -1,
) -> Use:
    """Return the use described by a call of a session."""
    return Use(
        keys=split_hashes(hashes),
        payload_bytes=session.layout.block_bytes,
        block_tokens=session.layout.block_tokens,
        tenant=tenant,
        traits=traits,
        num_prompt_blocks=num_prompt_blocks,
    )


class UseCounter:
    """Reports each request to the history and the depth curves once."""

    def __init__(
        self,
        history: History | None,
        depth: DepthCurves | None,
        residency_listener: ResidencyListener,
    ) -> None:
        self._history = history
        self._depth = depth
        self._residency_listener = residency_listener
        self._counted = _Counted()

    def advance(self, now_ns: int) -> None:
        """Advance the history's clock."""
        if self._history is not None:
            self._history.advance(now_ns)

    def count(self, session: str, use: Use, num_stored: int, now_ns: int) -> int:
        """Count a request that is announced or looked up, unless it was counted before.

        Its first ``num_stored`` blocks are in some tier. Returns how many leading blocks were known
        before this request.
        """
        if self._history is None or not use.keys:
            return 0
        request = use.traits.request_id
        num_known = self._counted.find(session, request, now_ns) if request else None
        if num_known is None:
            num_known = self._touch(self._history, session, use, num_stored, now_ns)
        return num_known

    def store(self, session: str, use: Use, now_ns: int) -> None:
        """Extend a request's chain by the offered blocks; counts it if that was not done before."""
        if self._history is None or not use.keys:
            return
        if self._counted.find(session, _name(use), now_ns) is None:
            self._touch(self._history, session, use, 0, now_ns)
        else:
            num_known = self._history.extend(use, now_ns)
            self._residency_listener.report_found(use.keys[num_known:])

    def _touch(self, history: History, session: str, use: Use, num_stored: int, now_ns: int) -> int:
        num_stored = max(num_stored, self._residency_listener.num_restored(use.keys))
        touched = history.touch(use, now_ns, num_stored)
        self._residency_listener.report_found(use.keys[touched.num_known :])
        if self._depth is not None:
            self._depth.note(use, touched.num_known, now_ns)
        self._counted.add(session, _name(use), touched.num_known, now_ns)
        return touched.num_known


def _name(use: Use) -> str | bytes:
    """Return the name of a request to remember: its id, or else the first block of its chain.

    Blocks offered without an id were usually looked up before, in pieces of other lengths.
    """
    return use.traits.request_id or use.keys[0]


class _Counted:
    """Requests counted within the last minutes."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str | bytes], tuple[int, int]] = {}
        """When each request was counted and how many blocks were known then; oldest first."""

    def add(self, session: str, name: str | bytes, num_known: int, now_ns: int) -> None:
        self._seen.pop((session, name), None)
        self._seen[session, name] = (now_ns, num_known)
        if len(self._seen) > USES_MAX:
            del self._seen[next(iter(self._seen))]

    def find(self, session: str, name: str | bytes, now_ns: int) -> int | None:
        """Return how many blocks were known when a request was counted; None if not recently."""
        seen = self._seen.get((session, name))
        if seen is None or now_ns - seen[0] > USE_KEPT_NS:
            return None
        return seen[1]
