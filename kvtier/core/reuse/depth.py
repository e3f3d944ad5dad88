"""How deep into a prompt it pays to keep blocks: learned for each class of traffic.

Theory
------
A block stored at some depth is asked for again so many times, on average: reuses over stores, both
counted by depth. Heads of prompts come back with every request, tails with the next turn or never.
It pays to keep a depth where the reuses, times what each saves, are more than what storing costs;
``max_offload_tokens`` is the end of the deepest such depth.

What was stored just now had no time to come back, so stores are counted a quarter of an hour later.
Reuse is seen for blocks that were refused as well, since a history remembers what was asked for
however it was answered: a class that was cut short opens again once its tails come back. Both
counts age, half in an hour.

Nothing is cut without evidence: a class that has none is judged with all of its kind, and if they
have none, without a limit.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.core.cost.fit import number
from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import KIND_CHARACTERS_MAX, TENANTS_COUNTED_MAX
from kvtier.core.reuse.history import Use

__all__ = ["DEPTH_EDGES", "DepthCurves"]

DEPTH_EDGES: Sequence[int] = (
    0, 256, 512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152, 65_536,
    98_304, 131_072, 262_144, 524_288, 1_048_576,
)  # fmt: skip
"""In tokens; what lies deeper than the last one counts as being there."""

_CLASSES_MAX = 64
"""Kinds and tenants are words of clients, without end; the one unused for longest is forgotten."""

_TENANT_REQUESTS_MIN = 500
"""A tenant has a curve of its own from so many requests on; before, it would be noise."""

_KEPT_CLASSES_MAX = 12
"""Across restarts, those used last: 4 KB."""

_BLOCKS_MIN = 200.0
"""Blocks stored or reused at a depth before anything is said of it, and ..."""

_REQUESTS_MIN = 20.0
"""... requests that did so: one long document is no evidence."""

_RIPE_NS = 900_000_000_000
"""When a store counts: of what comes back at all in conversations, nine tenths do by then."""

_SLICE_NS = 60_000_000_000
"""What was stored within a minute is counted together."""

_HALF_LIFE_NS = 3_600_000_000_000

_COUNT_MAX = 1e12

_CONTINUES_EDGES: Sequence[float] = (0.34, 0.67)

_Key = tuple[bytes, str, int]
"""Tenant or nothing, kind, and what the client says of a next turn."""


@dataclass(slots=True)
class _Slice:
    """What was stored within a minute, by depth."""

    begins_ns: int
    blocks: list[float] = field(default_factory=lambda: [0.0] * len(DEPTH_EDGES))
    requests: list[float] = field(default_factory=lambda: [0.0] * len(DEPTH_EDGES))


@dataclass(slots=True)
class _Curve:
    """Stores and reuses of one class, by depth."""

    stores: list[float] = field(default_factory=lambda: [0.0] * len(DEPTH_EDGES))
    requests: list[float] = field(default_factory=lambda: [0.0] * len(DEPTH_EDGES))
    reuses: list[float] = field(default_factory=lambda: [0.0] * len(DEPTH_EDGES))
    young: deque[_Slice] = field(default_factory=deque)
    """Stores that do not count yet: a quarter of an hour in minutes."""
    aged_ns: int | None = None
    """None: it is of an earlier run, by another clock."""
    num_requests: int = 0

    def advance(self, now_ns: int) -> None:
        """Count what has become ripe, and let the rest age; a clock that is set back waits."""
        if self.aged_ns is None:
            self.aged_ns = now_ns
        elapsed_ns = now_ns - self.aged_ns
        if elapsed_ns >= _SLICE_NS:
            weight = 0.5 ** (elapsed_ns / _HALF_LIFE_NS)
            for counts in (self.stores, self.requests, self.reuses):
                counts[:] = [count * weight for count in counts]
            self.aged_ns = now_ns
        while self.young and now_ns - self.young[0].begins_ns >= _RIPE_NS:
            ripe = self.young.popleft()
            for place in range(len(DEPTH_EDGES)):
                self.stores[place] += ripe.blocks[place]
                self.requests[place] += ripe.requests[place]

    def slice_at(self, now_ns: int) -> _Slice:
        """Return what the stores of now are counted in."""
        if not self.young or now_ns - self.young[-1].begins_ns >= _SLICE_NS:
            self.young.append(_Slice(now_ns))
        return self.young[-1]

    def kept(self) -> list[list[float]]:
        """Return what can be kept: reuses, requests, and the stores that have had their time."""
        rounded = [[round(n, 1) for n in each] for each in (self.stores, self.requests)]
        return [*rounded, [round(n, 1) for n in self.reuses]]

    @classmethod
    def recalled(cls, counts: object) -> "_Curve":
        """Return the curve of ``kept``; raises ValueError where that cannot be."""
        if not isinstance(counts, list) or len(counts) != 3:
            raise ValueError(f"{counts!r:.40} is no curve")
        columns = [_checked(each) for each in counts]
        return cls(stores=columns[0], requests=columns[1], reuses=columns[2])

    def has_evidence(self, place: int) -> bool:
        """Tell whether enough was stored at a depth, or came back, to say what comes of it."""
        num_blocks = self.stores[place] + self.reuses[place]
        return num_blocks >= _BLOCKS_MIN and self.requests[place] >= _REQUESTS_MIN


class DepthCurves:
    """Reuse by depth, and the limits that follow.

    ``most_tokens`` is the operator's limit, ``None`` for one that is learned; with
    ``is_prompt_alone`` no request goes beyond its prompt. ``worth`` gives, for the block that ends
    at so many tokens, the seconds that a reuse saves and those a store costs.
    """

    def __init__(
        self,
        worth: Callable[[int, Use], tuple[float, float]],
        most_tokens: int | None = None,
        *,
        is_prompt_alone: bool = False,
    ) -> None:
        self._worth = worth
        self.most_tokens = most_tokens
        self.is_prompt_alone = is_prompt_alone
        self._curves: OrderedDict[_Key, _Curve] = OrderedDict()
        """The one used last is last."""
        self._limits: dict[_Key, int | None] = {}
        """As last derived: explained, and shown."""
        self._tenants: OrderedDict[bytes, int] = OrderedDict()
        """Requests of each tenant, of those seen lately."""

    def note(self, use: Use, num_reused_blocks: int, now_ns: int) -> None:
        """Count one request: its first ``num_reused_blocks`` came back, the others are new."""
        tenant_key, kind_key = self._keys_of(use, is_counted=True)
        for key in {tenant_key, kind_key}:
            curve = self._curve(key, now_ns)
            curve.num_requests += 1
            for place in _spread(curve.reuses, 0, num_reused_blocks, use.block_tokens):
                curve.requests[place] += 1
            _note_stores(curve, num_reused_blocks, len(use.keys), use.block_tokens, now_ns)

    def note_generated(self, use: Use, first: int, now_ns: int) -> None:
        """Count the blocks of generated tokens that a store offers, from ``first`` on."""
        if use.num_prompt_blocks < 0:
            return
        first = max(first, use.num_prompt_blocks)
        for key in set(self._keys_of(use)):
            curve = self._curve(key, now_ns)
            _note_stores(curve, first, len(use.keys), use.block_tokens, now_ns)

    def max_offload_tokens(self, use: Use) -> int | None:
        """Return how many leading tokens of a request are to be offered; None: all of them.

        What the request says comes first, then what the operator says, then what was learned.
        """
        most_tokens = use.traits.max_offload_tokens
        if most_tokens is None:
            most_tokens = self.most_tokens
        if most_tokens is None:
            most_tokens = self._learned(use)
        if self.is_prompt_alone and use.num_prompt_blocks >= 0:
            prompt_tokens = use.num_prompt_blocks * use.block_tokens
            most_tokens = prompt_tokens if most_tokens is None else min(most_tokens, prompt_tokens)
        if most_tokens is None:
            return None
        return most_tokens // use.block_tokens * use.block_tokens

    def classes(self) -> list[dict[str, object]]:
        """Return the curves for people: for each class its limit, and its reuse by depth."""
        return [
            {
                "tenant": tenant.hex(),
                "kind": kind,
                "continues": ("unknown", "unlikely", "maybe", "likely")[hint],
                "requests": curve.num_requests,
                "max_offload_tokens": self._limits.get((tenant, kind, hint)),
                "depths": [
                    {
                        "from_tokens": edge,
                        "stored_blocks": round(curve.stores[place]),
                        "reused_blocks": round(curve.reuses[place]),
                    }
                    for place, edge in enumerate(DEPTH_EDGES)
                    if curve.stores[place] >= 0.5 or curve.reuses[place] >= 0.5
                ],
            }
            for (tenant, kind, hint), curve in self._curves.items()
        ]

    # Across restarts

    def document(self) -> Mapping[str, Any]:
        """Return the curves to be kept: those of kinds, since tenants are nobody's business."""
        own = [(kind, hint, curve) for (who, kind, hint), curve in self._curves.items() if not who]
        return {
            "depth_edges": list(DEPTH_EDGES),
            "kinds": [[kind, hint, curve.kept()] for kind, hint, curve in own[-_KEPT_CLASSES_MAX:]],
        }

    def recall(self, document: Mapping[str, Any]) -> str:
        """Begin with what an earlier run kept, all or nothing; returns why not, or ``""``.

        Counts for other depths than ours mean nothing, and are left.
        """
        if document.get("depth_edges") != list(DEPTH_EDGES):
            return ""
        try:
            self._curves = _recalled(document.get("kinds"))
        except (ValueError, TypeError) as fault:
            return str(fault)
        return ""

    def _learned(self, use: Use) -> int | None:
        for key in self._keys_of(use):
            curve = self._curves.get(key)
            if curve is not None and any(map(curve.has_evidence, range(len(DEPTH_EDGES)))):
                limit = self._limits[key] = self._limit(curve, use)
                return limit
        return None

    def _limit(self, curve: _Curve, use: Use) -> int | None:
        """Return the end of the deepest depth that pays, if what is known goes beyond it."""
        limit: int | None = 0
        for place, end_tokens in enumerate([*DEPTH_EDGES[1:], None]):
            if not curve.has_evidence(place):
                # Beyond what does not pay nothing is known to, yet between two that pay it may be.
                continue
            if end_tokens is None:
                middle_tokens = DEPTH_EDGES[place]
            else:
                middle_tokens = (DEPTH_EDGES[place] + end_tokens) // 2
            saved_s, cost_s = self._worth(max(middle_tokens, use.block_tokens), use)
            if curve.reuses[place] * saved_s > curve.stores[place] * cost_s:
                limit = end_tokens
        is_bounded = limit is not None and any(
            curve.has_evidence(place) for place, edge in enumerate(DEPTH_EDGES) if edge >= limit
        )
        return limit if is_bounded else None

    def _keys_of(self, use: Use, *, is_counted: bool = False) -> tuple[_Key, _Key]:
        """Return the class of a request, and that of all its kind, which may be the same."""
        hint = 0
        if use.traits.continues is not None:
            hint = 1 + bisect_left(_CONTINUES_EDGES, use.traits.continues)
        kind = (b"", use.traits.kind, hint)
        num_requests = self._tenants.get(use.tenant, 0)
        if is_counted:
            num_requests += 1
            self._tenants[use.tenant] = num_requests
            self._tenants.move_to_end(use.tenant)
            if len(self._tenants) > TENANTS_COUNTED_MAX:
                self._tenants.popitem(last=False)
        if use.tenant == NO_TENANT or num_requests < _TENANT_REQUESTS_MIN:
            return kind, kind
        return (use.tenant, use.traits.kind, hint), kind

    def _curve(self, key: _Key, now_ns: int) -> _Curve:
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve(aged_ns=now_ns)
            if len(self._curves) > _CLASSES_MAX:
                gone, _ = self._curves.popitem(last=False)
                self._limits.pop(gone, None)
        self._curves.move_to_end(key)
        curve.advance(now_ns)
        return curve


def _recalled(kinds: object) -> OrderedDict[_Key, _Curve]:
    """Return the curves that were kept; raises ValueError or TypeError where they cannot be."""
    if not isinstance(kinds, list) or len(kinds) > _KEPT_CLASSES_MAX:
        raise ValueError("kinds is no list of them")
    curves: OrderedDict[_Key, _Curve] = OrderedDict()
    for kind, hint, counts in kinds:
        is_word = isinstance(kind, str) and len(kind) <= KIND_CHARACTERS_MAX
        if not is_word or type(hint) is not int or not 0 <= hint <= 3:
            raise ValueError(f"{kind!r:.40} is no kind")
        curves[b"", kind, hint] = _Curve.recalled(counts)
    return curves


def _checked(counts: object) -> list[float]:
    """Return one count for each depth; raises ValueError where they are not such."""
    if not isinstance(counts, list) or len(counts) != len(DEPTH_EDGES):
        raise ValueError(f"{counts!r:.40} are no counts by depth")
    return [number(each, 0.0, _COUNT_MAX) for each in counts]


def _note_stores(curve: _Curve, first: int, end: int, block_tokens: int, now_ns: int) -> None:
    if first >= end:
        return
    stored = curve.slice_at(now_ns)
    for place in _spread(stored.blocks, first, end, block_tokens):
        stored.requests[place] += 1


def _spread(counts: list[float], first: int, end: int, block_tokens: int) -> range:
    """Add blocks ``first`` to ``end`` to the depths where they begin; returns those depths."""
    if first >= end:
        return range(0)
    # Blocks that begin before an edge lie before it.
    befores = [min(max(-(-edge // block_tokens), first), end) for edge in DEPTH_EDGES]
    befores.append(end)
    for place in range(len(DEPTH_EDGES)):
        counts[place] += befores[place + 1] - befores[place]
    touched = [place for place in range(len(DEPTH_EDGES)) if befores[place + 1] > befores[place]]
    return range(touched[0], touched[-1] + 1)
