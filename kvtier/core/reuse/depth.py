"""Learns how deep into a prompt it pays to keep blocks, for each class of traffic.

Theory
------
How often a block stored at some depth is requested again, on average, is reuses over stores, both
counted by depth. Heads of prompts come back with every request, tails with the next turn or never.
Keeping a depth pays if the reuses, times what each saves, exceed the cost of storing;
``max_offload_tokens`` is the end of the deepest such depth.

A block that was just stored had no time to be reused, so stores count a quarter of an hour later.
Reuse is also seen for blocks that were refused, because a history remembers every request: the
limit of a class rises again once its tails are reused. Both counts decay, by half in an hour.

Nothing is limited without evidence: a class without it has the limit of its kind, or none if there
is no evidence for the kind either.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.cost.fit import number
from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import KIND_CHARACTERS_MAX, TENANTS_COUNTED_MAX
from kvtier.core.reuse.history import Use

__all__ = ["DEPTH_EDGES", "DepthCurves"]

DEPTH_EDGES: Sequence[int] = (
    0, 256, 512, 1024, 2048, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152, 65_536,
    98_304, 131_072, 262_144, 524_288, 1_048_576,
)  # fmt: skip
"""Start of each depth, in tokens; deeper positions belong to the last one."""

_CLASSES_MAX = 64
"""Clients choose kinds and tenants freely; the least recently used class is forgotten."""

_TENANT_REQUESTS_MIN = 500
"""Number of requests from which a tenant has its own curve; before, it would be noise."""

_KEPT_CLASSES_MAX = 12
"""Classes saved across restarts, the most recently used: 4 KB."""

_BLOCKS_MIN = 200.0
"""Evidence at a depth: this many blocks stored or reused, and ..."""

_REQUESTS_MIN = 20.0
"""... this many requests: one long document is no evidence."""

_RIPE_NS = 900_000_000_000
"""Age at which a store counts: in conversations, nine tenths of all reuse happens by then."""

_SLICE_NS = 60_000_000_000
"""Stores within a minute are counted together."""

_HALF_LIFE_NS = 3_600_000_000_000

_COUNT_MAX = 1e12

_CONTINUES_EDGES: Sequence[float] = (0.34, 0.67)

_Counts = npt.NDArray[np.float64]
"""One count per depth."""

_Key = tuple[bytes, str, int]
"""(tenant or empty, kind, class of ``continues``)."""


@dataclass(slots=True)
class _Slice:
    """The stores of one minute, by depth."""

    begins_ns: int
    blocks: _Counts = field(default_factory=lambda: np.zeros(len(DEPTH_EDGES)))
    requests: _Counts = field(default_factory=lambda: np.zeros(len(DEPTH_EDGES)))


@dataclass(slots=True)
class _Curve:
    """Stores and reuses of one class, by depth."""

    stores: _Counts = field(default_factory=lambda: np.zeros(len(DEPTH_EDGES)))
    requests: _Counts = field(default_factory=lambda: np.zeros(len(DEPTH_EDGES)))
    reuses: _Counts = field(default_factory=lambda: np.zeros(len(DEPTH_EDGES)))
    young: deque[_Slice] = field(default_factory=deque)
    """Stores that do not count yet: a quarter of an hour, in minutes."""
    aged_ns: int | None = None
    """Time of the last decay; None if from an earlier run, with another clock."""
    num_requests: int = 0

    def advance(self, now_ns: int) -> None:
        """Count stores that are old enough, and decay the counts; ignores a clock set back."""
        if self.aged_ns is None:
            self.aged_ns = now_ns
        elapsed_ns = now_ns - self.aged_ns
        if elapsed_ns >= _SLICE_NS:
            weight = 0.5 ** (elapsed_ns / _HALF_LIFE_NS)
            for counts in (self.stores, self.requests, self.reuses):
                np.multiply(counts, weight, out=counts)
            self.aged_ns = now_ns
        while self.young and now_ns - self.young[0].begins_ns >= _RIPE_NS:
            ripe = self.young.popleft()
            self.stores += ripe.blocks
            self.requests += ripe.requests

    def slice_at(self, now_ns: int) -> _Slice:
        """Return the slice for stores at this time."""
        if not self.young or now_ns - self.young[-1].begins_ns >= _SLICE_NS:
            self.young.append(_Slice(now_ns))
        return self.young[-1]

    def kept(self) -> list[list[float]]:
        """Return the saved counts: requests, reuses, and the stores that count already."""
        return [counts.round(1).tolist() for counts in (self.stores, self.requests, self.reuses)]

    @classmethod
    def recalled(cls, counts: object) -> "_Curve":
        """Return the curve of ``kept``; raises ValueError if it is invalid."""
        if not isinstance(counts, list) or len(counts) != 3:
            raise ValueError(f"{counts!r:.40} is not a curve")
        stores, requests, reuses = map(_checked, counts)
        return cls(stores, requests, reuses)

    def has_evidence(self) -> npt.NDArray[np.bool_]:
        """Return at which depths enough was stored or reused to draw a conclusion."""
        has_blocks: npt.NDArray[np.bool_] = self.stores + self.reuses >= _BLOCKS_MIN
        return has_blocks & (self.requests >= _REQUESTS_MIN)


class DepthCurves:
    """Reuse by depth, and the limits derived from it.

    ``most_tokens`` is the operator's limit, None for a learned one; with ``is_prompt_alone`` no
    request offloads beyond its prompt. ``worth`` returns, for the block that ends at a token, the
    seconds that a reuse saves and those that a store costs.
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
        """By class, the one used last at the end."""
        self._limits: dict[_Key, int | None] = {}
        """The last limit of each class, for explanations and display."""
        self._tenants: OrderedDict[bytes, int] = OrderedDict()
        """Number of requests of each recent tenant."""

    def note(self, use: Use, num_reused_blocks: int, now_ns: int) -> None:
        """Count one request: its first ``num_reused_blocks`` are reused, the others are new."""
        tenant_key, kind_key = self._keys_of(use, is_counted=True)
        for key in {tenant_key, kind_key}:
            curve = self._curve(key, now_ns)
            curve.num_requests += 1
            reused = _spread(curve.reuses, 0, num_reused_blocks, use.block_tokens)
            curve.requests[reused] += 1
            _note_stores(curve, num_reused_blocks, len(use.keys), use.block_tokens, now_ns)

    def note_generated(self, use: Use, first: int, now_ns: int) -> None:
        """Count the stored blocks of generated tokens, from ``first`` on."""
        if use.num_prompt_blocks < 0:
            return
        first = max(first, use.num_prompt_blocks)
        for key in set(self._keys_of(use)):
            curve = self._curve(key, now_ns)
            _note_stores(curve, first, len(use.keys), use.block_tokens, now_ns)

    def max_offload_tokens(self, use: Use) -> int | None:
        """Return how many leading tokens of a request to offload; None: all of them.

        The request's own limit comes first, then the operator's, then the learned one.
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
        """Return each class's limit and its reuse by depth, for display."""
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

    # Saved state

    def document(self) -> Mapping[str, Any]:
        """Return the curves to save; those of tenants are confidential and left out."""
        own = [(kind, hint, curve) for (who, kind, hint), curve in self._curves.items() if not who]
        return {
            "depth_edges": list(DEPTH_EDGES),
            "kinds": [[kind, hint, curve.kept()] for kind, hint, curve in own[-_KEPT_CLASSES_MAX:]],
        }

    def recall(self, document: Mapping[str, Any]) -> str:
        """Load the curves of an earlier run, all or nothing; returns the problem, or ``""``.

        Counts for other depths are ignored.
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
            if curve is not None and curve.has_evidence().any():
                limit = self._limits[key] = self._limit(curve, use)
                return limit
        return None

    def _limit(self, curve: _Curve, use: Use) -> int | None:
        """Return the end of the deepest depth that pays, if the evidence goes beyond it."""
        limit: int | None = 0
        has_evidence = curve.has_evidence()
        # Depths without evidence are skipped: one between two that pay may pay as well.
        for place in np.flatnonzero(has_evidence).tolist():
            edges = DEPTH_EDGES[place : place + 2]
            saved_s, cost_s = self._worth(max(sum(edges) // len(edges), use.block_tokens), use)
            if curve.reuses[place] * saved_s > curve.stores[place] * cost_s:
                limit = edges[1] if len(edges) > 1 else None
        is_bounded = limit is not None and has_evidence[np.array(DEPTH_EDGES) >= limit].any()
        return limit if is_bounded else None

    def _keys_of(self, use: Use, *, is_counted: bool = False) -> tuple[_Key, _Key]:
        """Return the class of a request, and that of its kind, which may be the same."""
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
    """Return the saved curves; raises ValueError or TypeError if they are invalid."""
    if not isinstance(kinds, list) or len(kinds) > _KEPT_CLASSES_MAX:
        raise ValueError("kinds is not a list of kinds")
    curves: OrderedDict[_Key, _Curve] = OrderedDict()
    for kind, hint, counts in kinds:
        is_word = isinstance(kind, str) and len(kind) <= KIND_CHARACTERS_MAX
        if not is_word or type(hint) is not int or not 0 <= hint <= 3:
            raise ValueError(f"{kind!r:.40} is not a kind")
        curves[b"", kind, hint] = _Curve.recalled(counts)
    return curves


def _checked(counts: object) -> _Counts:
    """Return one count per depth; raises ValueError if they are invalid."""
    if not isinstance(counts, list) or len(counts) != len(DEPTH_EDGES):
        raise ValueError(f"{counts!r:.40} is not a list of counts by depth")
    return np.array([number(each, 0.0, _COUNT_MAX) for each in counts])


def _note_stores(curve: _Curve, first: int, end: int, block_tokens: int, now_ns: int) -> None:
    if first < end:
        stored = curve.slice_at(now_ns)
        stored.requests[_spread(stored.blocks, first, end, block_tokens)] += 1


def _spread(counts: _Counts, first: int, end: int, block_tokens: int) -> slice:
    """Add blocks ``first`` to ``end`` to the depths where they begin; returns those depths."""
    if first >= end:
        return slice(0)
    # A block belongs to the depth in which it begins.
    first_blocks = -(-np.array(DEPTH_EDGES) // block_tokens)
    num_blocks = np.diff(first_blocks.clip(first, end), append=end)
    counts += num_blocks
    depths = np.flatnonzero(num_blocks)
    return slice(int(depths[0]), int(depths[-1]) + 1)
