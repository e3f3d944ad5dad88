"""Learns how likely chains are requested again, by group and age.

Theory
------
A *hazard* is the probability that a block left alone until the start of an age bin is requested
before the bin's end. Each group of runs has its own, estimated as events over exposure: requests in
a bin over blocks that entered it. Exposure is counted on entry, not on exit; otherwise the runs
still in a bin would be missing, and young groups be overrated.

Little evidence is not trusted: a group's hazard is shrunk towards that of all groups, and that one
towards a prior under which worth falls with age, which is LRU. The group of a single tenant is
shrunk towards the same group of all tenants. Evidence decays, so that a change of traffic shows
within thousands of requests.

The *density* is the yield of holding a block in a tier: the expected uses over the expected time
held, if it is given up at the best moment. It is an index of an optimal stopping rule (Gittins),
and may rise with age for groups that come back late or not at all.
"""

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["AGE_EDGES_S", "NUM_BINS", "Group", "Hazards", "Table", "densities"]

AGE_EDGES_S: Sequence[int] = (
    0, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
    4096, 6144, 12_288, 50_000,
)  # fmt: skip
"""Start of each age bin, in seconds; older runs stay in the last bin."""

NUM_BINS = len(AGE_EDGES_S) - 1

_GROUP_WEIGHT = 5.0
"""Evidence, in weighted blocks, at which a group counts as much as all groups together. Values from
3 to 10 make little difference (conversation trace, first half)."""

_PRIOR_WEIGHT = 30.0
"""The same weight for the prior; values from 10 to 100 make no difference."""

_DECAY = 0.995
_TOUCHES_PER_DECAY = 50
"""Half is forgotten in 7,000 requests; a quarter as many, or five times as many, are no better."""

_TOUCHES_PER_REFRESH = 32
"""Scores are computed for all groups at once, this often: 0.3 ms, or 10 us per request."""

_GROUPS_MAX = 1024
"""Far more groups than occur at a time. A new one replaces one that no longer occurs; if all still
occur, it shares group 0."""

_UNUSED_WEIGHT = 1.0
"""A group with less evidence than one block just touched no longer occurs."""

_KEPT_GROUPS_MAX = 64
"""Groups saved across restarts, those with most evidence: an hour of conversations has 90, and the
last third has a hundredth of the evidence. 12 KB."""

_COUNTS_MAX = 6e4
"""Upper bound of a saved count, in half precision."""

_EDGES: npt.NDArray[np.float64] = np.array(AGE_EDGES_S, np.float64)
_WIDTHS = np.diff(_EDGES)
_PRIOR = np.minimum(0.5, 0.2 * _WIDTHS / (_EDGES[1:] + 10.0))

Table = npt.NDArray[np.float64]
"""Values by group and age bin."""


class Group(NamedTuple):
    """The properties that runs with the same expected future share."""

    turn: int
    """0: the request's chain was new, 1: its second turn, 2: a later one."""
    length: int
    """Length class of the new part of the request."""
    uses: int
    """Uses of the blocks. 0: one, 1: two, 2: three or four, 3: more."""
    is_shared: bool
    """Whether the blocks precede a fork of many branches, like those of a system prompt."""
    is_generated: bool = False
    hint: int = 0
    """Class of the client's hints; 0: no hint."""
    tenant: bytes = b""
    """The tenant if it has groups of its own, else empty."""


_OTHER = Group(-1, 0, 0, is_shared=False)
"""Group 0, for all groups without a number of their own."""


class Hazards:
    """Counts of reuse by group and age, and the predictions from them."""

    def __init__(self) -> None:
        self._numbers: dict[Group, int] = {}
        self.groups: list[Group] = []
        self._shared: list[int] = []
        """By group, the number of the same group of all tenants; without a tenant, its own."""
        self._events = array("d")
        self._exposure = array("d")
        self._num_touches = 0
        self.densities: list[float] = []
        """By group and bin, flat: expected uses per second for each block held."""
        self._survival: Table = np.zeros((0, NUM_BINS + 1))
        """By group and age edge, the logarithm of the probability of no request until then."""
        self.number(_OTHER)

    def number(self, group: Group) -> int:
        """Return the number of a group, assigning one if necessary."""
        number = self._numbers.get(group)
        if number is not None:
            return number
        shared = self.number(group._replace(tenant=b"")) if group.tenant else None
        number = self._take()
        if not number and self._numbers:
            return 0
        self._numbers[group] = number
        self.groups[number] = group
        self._shared[number] = number if shared is None else shared
        self._refresh()
        return number

    def expose(self, group: int, age_bin: int, weight: float) -> None:
        """Note that blocks of a group, weighted, entered an age bin."""
        self._exposure[group * NUM_BINS + age_bin] += weight

    def note_event(self, group: int, age_bin: int, weight: float) -> None:
        """Note that blocks of a group, weighted, were requested in an age bin."""
        self._events[group * NUM_BINS + age_bin] += weight

    def advance(self) -> None:
        """Count one touch; at intervals, decay the evidence and update the scores."""
        self._num_touches += 1
        if self._num_touches % _TOUCHES_PER_DECAY == 0:
            for counts in (self._events, self._exposure):
                np.frombuffer(counts)[:] *= _DECAY
        # Often in the beginning, when each touch says much: after 1, 2, 4, 8 and 16.
        is_early = self._num_touches & (self._num_touches - 1) == 0
        if is_early or self._num_touches % _TOUCHES_PER_REFRESH == 0:
            self._refresh()

    def p_reuse(self, group: int, age_s: float, within_s: float) -> float:
        """Return the probability that a block left alone for ``age_s`` is requested in time.

        ``within_s`` is the time, in seconds.
        """
        row = self._survival[group]
        # Beyond the last bin, continue as at its end.
        age_s = min(age_s, max(0.0, AGE_EDGES_S[-1] - within_s))
        first, last = np.interp((age_s, age_s + within_s), _EDGES, row).tolist()
        return float(-np.expm1(last - first))

    def table(self) -> Table:
        """Return the hazard of each group in each age bin."""
        events = np.array(self._events).reshape(-1, NUM_BINS)
        exposure = np.array(self._exposure).reshape(-1, NUM_BINS)
        common = (events.sum(0) + _PRIOR_WEIGHT * _PRIOR) / (exposure.sum(0) + _PRIOR_WEIGHT)
        drawn = (events + _GROUP_WEIGHT * common) / (exposure + _GROUP_WEIGHT)
        own = np.flatnonzero(np.array(self._shared) != np.arange(len(drawn)))
        towards = _GROUP_WEIGHT * drawn[np.array(self._shared)[own]]
        drawn[own] = (events[own] + towards) / (exposure[own] + _GROUP_WEIGHT)
        hazards: Table = np.minimum(0.99, drawn)
        return hazards

    # Saved state

    def document(self) -> dict[str, Any]:
        """Return the groups with most evidence, except those of a single tenant."""
        weights = np.array(self._exposure).reshape(-1, NUM_BINS)[:, 0]
        shared = [n for n in np.argsort(-weights).tolist() if n and not self.groups[n].tenant]
        return {
            "age_edges_s": list(AGE_EDGES_S),
            "groups": [
                [*map(int, self.groups[number][:-1]), self._packed(number)]
                for number in shared[:_KEPT_GROUPS_MAX]
                if weights[number] >= _UNUSED_WEIGHT
            ],
        }

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore an earlier run's learned state, all or nothing; raises ValueError if invalid.

        Counts for other age bins are ignored.
        """
        groups = document.get("groups")
        if not isinstance(groups, list) or len(groups) > _KEPT_GROUPS_MAX:
            raise ValueError("groups is not a list of groups")
        if document.get("age_edges_s") != list(AGE_EDGES_S):
            return
        known = [_unpacked(each) for each in groups]
        for group, counts in known:
            first = self.number(group) * NUM_BINS
            for column, kept in zip((self._events, self._exposure), counts, strict=True):
                np.frombuffer(column)[first : first + NUM_BINS] = kept
        self._refresh()

    def _packed(self, number: int) -> str:
        """Return a group's counts in half precision: 128 characters."""
        part = slice(number * NUM_BINS, (number + 1) * NUM_BINS)
        counts = np.minimum([self._events[part], self._exposure[part]], _COUNTS_MAX)
        return b64encode(counts.astype("<f2").tobytes()).decode()

    def _take(self) -> int:
        """Return a number for a group, without evidence; 0 if there is none left."""
        number = len(self.groups)
        if number < _GROUPS_MAX:
            self.groups.append(_OTHER)
            self._shared.append(number)
            self._events.extend([0.0] * NUM_BINS)
            self._exposure.extend([0.0] * NUM_BINS)
            return number
        exposure = np.array(self._exposure).reshape(-1, NUM_BINS).sum(1)
        shared = np.array(self._shared)
        exposure[[0, *shared[shared != np.arange(number)].tolist()]] = np.inf
        number = int(exposure.argmin())
        if exposure[number] >= _UNUSED_WEIGHT:
            return 0
        part = slice(number * NUM_BINS, (number + 1) * NUM_BINS)
        for column in (self._events, self._exposure):
            np.frombuffer(column)[part] = 0.0
        del self._numbers[self.groups[number]]
        return number

    def _refresh(self) -> None:
        hazards = self.table()
        self._survival = np.zeros((len(hazards), NUM_BINS + 1))
        np.cumsum(np.log1p(-hazards), axis=1, out=self._survival[:, 1:])
        self.densities = densities(hazards).ravel().tolist()


def _unpacked(kept: object) -> tuple[Group, Table]:
    """Return a group, its events and exposure; raises ValueError if they are invalid."""
    if not isinstance(kept, list) or len(kept) != len(Group._fields):
        raise ValueError(f"{kept!r:.40} is not a group")
    *numbers, packed = kept
    limits = zip(numbers, (2, 64, 3, 1, 1, 6), strict=True)
    if not all(type(value) is int and 0 <= value <= limit for value, limit in limits):
        raise ValueError(f"{kept!r:.40} is not a group")
    turn, length, uses, is_shared, is_generated, hint = numbers
    counts = np.frombuffer(b64decode(str(packed), validate=True), "<f2").astype(np.float64)
    if counts.shape != (2 * NUM_BINS,) or not ((counts >= 0) & (counts <= _COUNTS_MAX)).all():
        raise ValueError(f"{packed!r:.40} is not a list of counts")
    group = Group(turn, length, uses, bool(is_shared), bool(is_generated), hint)
    return group, counts.reshape(2, NUM_BINS)


def densities(hazards: Table) -> Table:
    """Return the most uses per second held, over all times to give up, by group and age.

    A run is halfway through its bin, on average.
    """
    hits = hazards / 2
    held = _WIDTHS / 2 * (1 - hits / 2)
    alive = 1 - hits
    best = hits / held
    for step in range(1, NUM_BINS):
        # Column k extends from bin k through bin k + step.
        later, width, end = hazards[:, step:], _WIDTHS[step:], NUM_BINS - step
        hits, held, alive = hits[:, :end], held[:, :end], alive[:, :end]
        hits = hits + alive * later
        held = held + alive * width * (1 - later / 2)
        alive = alive * (1 - later)
        np.maximum(best[:, :end], hits / held, out=best[:, :end])
    return best
