"""How likely chains are asked for again, learned by group and by age.

Theory
------
A *hazard* is the chance that a block which was left alone until the start of an age bin is asked
for before the bin's end. Each group of runs has its own, as events over exposure: what came back in
a bin over what entered it. Exposure counts on entering, not on leaving, or the runs that are still
in a bin would be missing below and groups be overrated while they are young.

Little evidence is not believed: a group's hazard is drawn to the one of all groups, and that one to
a prior under which the older is worth the less, which is LRU; that of a tenant's own group is drawn
to the same group of all. Evidence fades, so that a change of the traffic shows within thousands of
requests.

What a place in a tier earns by holding a block is the *density*: the expected uses over the
expected time held, under the best moment to give up. It is a stopping rule's index (Gittins), and
may rise with age, where a group comes back late or not at all.
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
"""Where age bins begin; what is older than the last one stays in the last bin."""

NUM_BINS = len(AGE_EDGES_S) - 1

_GROUP_WEIGHT = 5.0
"""Evidence, in weighed blocks, at which a group counts as much as all groups together. Between 3
and 10 it matters little (conversation trace, first half)."""

_PRIOR_WEIGHT = 30.0
"""The same for the prior; from 10 to 100 nothing changes."""

_DECAY = 0.995
_TOUCHES_PER_DECAY = 50
"""Half is forgotten in 7,000 requests; a fourth of that or five times as much are no better."""

_TOUCHES_PER_REFRESH = 32
"""Scores are computed for all groups at once, that often: 0.3 ms, and 10 us a request."""

_GROUPS_MAX = 1024
"""Far more than there are at a time; a new one then takes the place of one that is not met any
more, and if there is none, joins the one of all that have no number of their own."""

_UNUSED_WEIGHT = 1.0
"""A group of which less is known than of one block just touched is not met any more."""

_KEPT_GROUPS_MAX = 64
"""Across restarts, those with most evidence: of an hour of conversations there are 90, and the last
third has a hundredth of it. 12 KB."""

_COUNTS_MAX = 6e4
"""The most that is kept of a count, in half precision."""

_EDGES: npt.NDArray[np.float64] = np.array(AGE_EDGES_S, np.float64)
_WIDTHS = np.diff(_EDGES)
_PRIOR = np.minimum(0.5, 0.2 * _WIDTHS / (_EDGES[1:] + 10.0))

Table = npt.NDArray[np.float64]
"""By group and age bin."""


class Group(NamedTuple):
    """What runs have in common that are expected to have the same future."""

    turn: int
    """0: the request's chain was new, 1: its second turn, 2: a later one."""
    length: int
    """Of the new part of the request, as the number of bits of its length."""
    uses: int
    """Of the blocks: 0: one, 1: two, 2: three or four, 3: more."""
    is_shared: bool
    """The blocks lie before a fork of many branches, as those of a system prompt do."""
    is_generated: bool = False
    hint: int = 0
    """What the client says of the future; 0: nothing."""
    tenant: bytes = b""
    """Whose, where one says so much that it is judged alone; else nothing."""


_OTHER = Group(-1, 0, 0, is_shared=False)
"""The first group, of all that have no number of their own."""


class Hazards:
    """Counts of what came back, and what follows from them."""

    def __init__(self) -> None:
        self._numbers: dict[Group, int] = {}
        self.groups: list[Group] = []
        self._shared: list[int] = []
        """By group, the same of all tenants; of one that belongs to no tenant, itself."""
        self._events = array("d")
        self._exposure = array("d")
        self._num_touches = 0
        self.densities: list[float] = []
        """By group and bin, flat: expected uses a second for each block held."""
        self._survival: Table = np.zeros((0, NUM_BINS + 1))
        """By group and age edge, the logarithm of the chance to be left alone until then."""
        self.number(_OTHER)

    def number(self, group: Group) -> int:
        """Return the number of a group, a new one where it was not met before."""
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
        """Note that blocks of a group, weighed, entered an age bin."""
        self._exposure[group * NUM_BINS + age_bin] += weight

    def note_event(self, group: int, age_bin: int, weight: float) -> None:
        """Note that blocks of a group, weighed, were asked for in an age bin."""
        self._events[group * NUM_BINS + age_bin] += weight

    def advance(self) -> None:
        """Count one touch; old evidence fades, and scores follow the new, every now and then."""
        self._num_touches += 1
        if self._num_touches % _TOUCHES_PER_DECAY == 0:
            for counts in (self._events, self._exposure):
                np.frombuffer(counts)[:] *= _DECAY
        # Often in the beginning, when each touch says much: after 1, 2, 4, 8 and 16.
        is_early = self._num_touches & (self._num_touches - 1) == 0
        if is_early or self._num_touches % _TOUCHES_PER_REFRESH == 0:
            self._refresh()

    def p_reuse(self, group: int, age_s: float, within_s: float) -> float:
        """Return the chance that a block left alone for ``age_s`` is asked for within a time."""
        row = self._survival[group]
        # Beyond the last bin it goes on as at its end.
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

    # Across restarts

    def document(self) -> dict[str, Any]:
        """Return what is known of the groups with most evidence, but for those of one tenant."""
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
        """Begin with what an earlier run learned, all or nothing; raises ValueError if it is not.

        Counts for other ages than ours mean nothing, and are left.
        """
        groups = document.get("groups")
        if not isinstance(groups, list) or len(groups) > _KEPT_GROUPS_MAX:
            raise ValueError("groups is no list of them")
        if document.get("age_edges_s") != list(AGE_EDGES_S):
            return
        known = [_unpacked(each) for each in groups]
        for group, counts in known:
            first = self.number(group) * NUM_BINS
            for column, kept in zip((self._events, self._exposure), counts, strict=True):
                np.frombuffer(column)[first : first + NUM_BINS] = kept
        self._refresh()

    def _packed(self, number: int) -> str:
        """Return a group's counts, in half precision: 128 characters."""
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
    """Return a group and its events and exposure; raises ValueError where that cannot be."""
    if not isinstance(kept, list) or len(kept) != len(Group._fields):
        raise ValueError(f"{kept!r:.40} is no group")
    *numbers, packed = kept
    limits = zip(numbers, (2, 64, 3, 1, 1, 6), strict=True)
    if not all(type(value) is int and 0 <= value <= limit for value, limit in limits):
        raise ValueError(f"{kept!r:.40} is no group")
    turn, length, uses, is_shared, is_generated, hint = numbers
    counts = np.frombuffer(b64decode(str(packed), validate=True), "<f2").astype(np.float64)
    if counts.shape != (2 * NUM_BINS,) or not ((counts >= 0) & (counts <= _COUNTS_MAX)).all():
        raise ValueError(f"{packed!r:.40} are no counts")
    group = Group(turn, length, uses, bool(is_shared), bool(is_generated), hint)
    return group, counts.reshape(2, NUM_BINS)


def densities(hazards: Table) -> Table:
    """Return for each group and age the most uses per second held, over all times to give up.

    A run is half through its bin, on average.
    """
    hits = hazards / 2
    held = _WIDTHS / 2 * (1 - hits / 2)
    alive = 1 - hits
    best = hits / held
    for step in range(1, NUM_BINS):
        # Column k goes on from bin k through bin k + step.
        later, width, end = hazards[:, step:], _WIDTHS[step:], NUM_BINS - step
        hits, held, alive = hits[:, :end], held[:, :end], alive[:, :end]
        hits = hits + alive * later
        held = held + alive * width * (1 - later / 2)
        alive = alive * (1 - later)
        np.maximum(best[:, :end], hits / held, out=best[:, :end])
    return best
