"""Fits a sum of costs, each a rate times an amount, to what it really took.

Theory
------
The rates minimise the squared *relative* error over the latest measurements, so that short ones
count like long ones, none of them negative. Younger measurements weigh more, and one far off weighs
as much as one a little off (Huber): a single stall changes next to nothing. Several in a row that
are all off to the same side are no outliers but another world: what was measured before them is
then forgotten.

Measurements that are all alike do not tell rates apart. A weak pull towards the shape of the last
rates known shares the error out in proportion; it is worth half a measurement.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from typing import Any

__all__ = ["SECONDS_MAX", "Fit", "Rate", "is_amount", "number", "table"]

SECONDS_MAX = 1e5
"""Nothing is predicted to take longer than a day, and nothing measured longer is believed."""

_SECONDS_MIN = 1e-6
"""Nor is anything predicted to take no time at all."""

_AMOUNT_MAX = 1e18
"""Bytes or squared tokens that no machine has."""

_WINDOW = 32
"""Measurements kept: some four restores, or half a second of steps."""

_HALF_LIFE_SAMPLES = 12.0
_HALF_LIFE_S = 15.0
"""A measurement weighs half after so many younger ones, or when it is so much older."""

_CHANGED_RUN = 4
"""So many in a row off to the same side are a change: the reads that one stall holds up are at most
as many as a tier has threads, and these few more."""

_CHANGED_LOG = log(1.5)
"""Off by less than half is noise."""

_PULL = 0.5
"""Weight of the last known shape, in measurements."""

_REFIT_EVERY = 8
"""Measurements from fit to fit once there are enough: a fit takes some 150 us."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One cost per amount: what it is before anything was measured, and what it can be."""

    guess: float
    lowest: float
    highest: float


@dataclass(slots=True)
class _Sample:
    terms: tuple[float, ...]
    seconds: float
    at_ns: int


class Fit:
    """Predicts ``sum(rate * amount)`` and how far above it the slow ones lie."""

    def __init__(self, rates: Sequence[Rate], tail: float) -> None:
        """Begin with guesses, and with ``tail`` as P95 over mean."""
        self._limits = tuple(rates)
        self._anchor = tuple(rate.guess for rate in rates)
        self._first_tail = tail
        self.rates = self._anchor
        self.tail = tail
        self.num_noted = 0
        self.noted_ns: int | None = None
        """When the last measurement came."""
        self._window: deque[_Sample] = deque(maxlen=_WINDOW)
        self._noise = 0.3
        self._run = 0
        self._num_unfitted = 0

    def guess(self, rates: Sequence[float]) -> None:
        """Begin with other guesses than those it was made with."""
        assert not self.num_noted, "a guess is no better than what was measured"
        self.rates = self._anchor = tuple(rates)

    def mean_s(self, terms: Sequence[float]) -> float:
        """Predict what these amounts take."""
        total = sum(rate * term for rate, term in zip(self.rates, terms, strict=True))
        return min(max(total, _SECONDS_MIN), SECONDS_MAX)

    @property
    def looks_faster(self) -> bool:
        """Tell whether the last measurement was far below what was expected."""
        return self._run < 0

    def note(self, terms: tuple[float, ...], seconds: float, now_ns: int) -> bool:
        """Learn from one measurement; False: it is none, and was left out."""
        if not (0.0 < seconds <= SECONDS_MAX) or not all(map(is_amount, terms)):
            return False
        seconds = max(float(seconds), _SECONDS_MIN)
        off = log(seconds / self.mean_s(terms))
        self._window.append(_Sample(tuple(map(float, terms)), seconds, now_ns))
        self.num_noted += 1
        self.noted_ns = now_ns
        self._num_unfitted += 1
        self._count_run(off)
        if abs(self._run) >= _CHANGED_RUN:
            self._begin_again()
        elif self._num_unfitted >= min(_REFIT_EVERY, len(self._window) // 2):
            self._refit()
        return True

    def _count_run(self, off: float) -> None:
        """Count measurements in a row that are off to one side, as a number with its sign."""
        if abs(off) < max(_CHANGED_LOG, 3.0 * self._noise) or len(self._window) <= 1:
            self._run = 0
        else:
            side = 1 if off > 0 else -1
            self._run = self._run + side if self._run * side > 0 else side

    def _begin_again(self) -> None:
        """Forget all but the measurements that showed that the world changed."""
        latest = list(self._window)[-_CHANGED_RUN:]
        self._window.clear()
        self._window.extend(latest)
        self._anchor = self.rates
        self._run = 0
        self._refit()

    def _refit(self) -> None:
        self._num_unfitted = 0
        samples = list(self._window)
        weights = _ages(samples)
        anchor = self._scaled_anchor(samples, weights)
        # The first rates are far from any measurement: from there every one looks like an outlier.
        is_first = len(samples) <= _CHANGED_RUN
        rates = anchor if is_first else self.rates
        for _ in range(2 if is_first else 1):
            rates = self._solved(samples, weights, rates, anchor)
        self.rates = rates
        self._measure(samples)

    def _scaled_anchor(self, samples: list[_Sample], weights: list[float]) -> tuple[float, ...]:
        """Return the last known shape at the level of the measurements: their median."""
        offs = sorted(
            (sample.seconds / max(_dot(self._anchor, sample.terms), _SECONDS_MIN), weight)
            for sample, weight in zip(samples, weights, strict=True)
        )
        middle = _middle(offs)
        return tuple(
            min(max(rate * middle, limit.lowest), limit.highest)
            for rate, limit in zip(self._anchor, self._limits, strict=True)
        )

    def _solved(
        self,
        samples: list[_Sample],
        weights: list[float],
        rates: tuple[float, ...],
        anchor: tuple[float, ...],
    ) -> tuple[float, ...]:
        """Return the rates of least squares, each measurement weighed by how far ``rates`` is."""
        size = range(len(rates))
        matrix = [[0.0] * len(rates) for _ in size]
        vector = [0.0] * len(rates)
        bend = max(0.1, 2.0 * self._noise)
        for sample, age in zip(samples, weights, strict=True):
            expected = max(_dot(rates, sample.terms), _SECONDS_MIN)
            off = abs(sample.seconds / expected - 1.0)
            weight = age if off <= bend else age * bend / off
            scaled = [term / expected for term in sample.terms]
            for i in size:
                pull = weight * scaled[i]
                if pull:
                    vector[i] += pull * sample.seconds / expected
                    row = matrix[i]
                    for j in size:
                        row[j] += pull * scaled[j]
        share = _PULL / sum(weights)
        for i in size:
            strength = share * matrix[i][i]
            matrix[i][i] += strength
            vector[i] += strength * anchor[i]
        return self._descended(matrix, vector, rates, anchor)

    def _descended(
        self,
        matrix: list[list[float]],
        vector: list[float],
        rates: tuple[float, ...],
        anchor: tuple[float, ...],
    ) -> tuple[float, ...]:
        """Solve within the limits, one rate after the other, until they no longer move."""
        found = list(rates)
        for _ in range(30):
            moved = 0.0
            for i, (row, limit) in enumerate(zip(matrix, self._limits, strict=True)):
                if row[i] <= 0.0:  # nothing measured has any of it
                    found[i] = anchor[i]
                    continue
                rest = vector[i] - _dot(row, found) + row[i] * found[i]
                value = min(max(rest / row[i], limit.lowest), limit.highest)
                moved = max(moved, abs(value - found[i]) * sqrt(row[i]))
                found[i] = value
            if moved < 1e-3:
                break
        return tuple(found)

    def _measure(self, samples: list[_Sample]) -> None:
        """Find how far the measurements scatter, and where the slow ones lie."""
        offs = sorted(sample.seconds / self.mean_s(sample.terms) for sample in samples)
        count = len(offs)
        spread = sorted(abs(log(off)) for off in offs)
        # So few agree by chance, or because the fit passes through them.
        least = 0.0 if count >= 8 else self._noise
        self._noise = max(spread[count // 2], least)
        # One slow measurement is no tail: a read that hung would else close the tier for a minute.
        slow = offs[max(min(ceil(0.95 * count) - 1, count - 2), 0)]
        # Few measurements do not show a tail; until there are eight, a part of the guess stays.
        unknown = max(0.0, 1.0 - count / 8)
        self.tail = min(max(slow, self._first_tail**unknown, 1.0), 1e3)

    # Across restarts

    def document(self) -> dict[str, Any]:
        """Return what was learned."""
        return {"rates": list(self.rates), "tail": self.tail, "num_noted": self.num_noted}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Begin with what an earlier run learned; raises ValueError where it is not such."""
        rates = document.get("rates")
        if not isinstance(rates, list) or len(rates) != len(self._limits):
            raise ValueError(f"there should be {len(self._limits)} rates")
        limited = zip(rates, self._limits, strict=True)
        kept = tuple(number(rate, limit.lowest, limit.highest) for rate, limit in limited)
        tail = number(document.get("tail"), 1.0, 1e3)
        self.rates = self._anchor = kept
        # It may be another disk by now: half of the doubt that there was at first comes back.
        self.tail = max(tail, sqrt(self._first_tail))


def is_amount(value: float) -> bool:
    """Tell whether a value can be a count or a size: finite, not negative, not absurd."""
    return 0.0 <= value <= _AMOUNT_MAX


def number(value: object, lowest: float, highest: float) -> float:
    """Return a number of a document; raises ValueError where it is none, or out of bounds."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and lowest <= value <= highest
    ):
        return float(value)
    raise ValueError(f"{value!r:.40} is no number between {lowest:g} and {highest:g}")


def table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a document, empty if absent; raises ValueError where it is no table."""
    part = document.get(name, {})
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} is no table")  # noqa: TRY004 a document's fault, no caller's
    return part


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _middle(offs: list[tuple[float, float]]) -> float:
    """Return the median of sorted pairs of a value and its weight."""
    half = sum(weight for _, weight in offs) / 2
    for value, weight in offs:
        half -= weight
        if half <= 0:
            return value
    return offs[-1][0]


def _ages(samples: list[_Sample]) -> list[float]:
    """Return how much each measurement still weighs; the clock may have been set back."""
    newest = max(sample.at_ns for sample in samples)
    last = len(samples) - 1
    return [
        0.5
        ** (
            (last - place) / _HALF_LIFE_SAMPLES
            + min((newest - sample.at_ns) / 1e9 / _HALF_LIFE_S, 10.0)
        )
        for place, sample in enumerate(samples)
    ]
