"""Fits a sum of costs, each a rate times an amount, to measured durations.

Theory
------
The rates minimize the squared *relative* error over the latest measurements, so short and long ones
count alike, and none is negative. Recent measurements weigh more, and an outlier weighs no more
than a slight deviation (Huber), so a single stall changes next to nothing. Several outliers in a
row on the same side mean that conditions have changed: earlier measurements are then dropped.

Measurements that are all alike cannot separate the rates. A weak pull towards the shape of the last
known rates then distributes the error in proportion; it weighs half a measurement.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SECONDS_MAX", "Fit", "Rate", "is_amount", "number", "table"]

SECONDS_MAX = 1e5
"""About a day: the longest prediction, and the longest measurement accepted."""

_SECONDS_MIN = 1e-6
"""The shortest prediction."""

_AMOUNT_MAX = 1e18
"""More bytes or squared tokens than any machine has."""

_WINDOW = 32
"""Measurements kept: about four restores, or half a second of steps."""

_HALF_LIFE_SAMPLES = 12.0
_HALF_LIFE_S = 15.0
"""A measurement loses half its weight after this many newer ones, and half at this age."""

_CHANGE_STREAK = 4
"""This many outliers in a row on one side are a change: a stall delays at most as many reads as a
tier has threads, and this is a few more."""

_OUTLIER_LOG = log(1.5)
"""Deviations below this are noise."""

_PULL = 0.5
"""Weight of the last known shape, in measurements."""

_REFIT_EVERY = 8
"""Measurements between fits, once there are enough: a fit takes about 150 us."""


_Values = npt.NDArray[np.float64]
_Rates = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rate:
    """The cost per amount: an initial guess and its bounds."""

    guess: float
    lowest: float
    highest: float


@dataclass(slots=True)
class _Sample:
    terms: tuple[float, ...]
    seconds: float
    at_ns: int


class Fit:
    """Predicts ``sum(rate * amount)``, and the ratio of slow cases to the mean."""

    def __init__(self, rates: Sequence[Rate], tail: float) -> None:
        """Start from guesses, and with ``tail`` as the ratio of P95 to the mean."""
        self._limits = tuple(rates)
        self._anchor = tuple(rate.guess for rate in rates)
        self._first_tail = tail
        self.rates = self._anchor
        self.tail = tail
        self.num_noted = 0
        self.noted_ns: int | None = None
        """Time of the last measurement."""
        self._window: deque[_Sample] = deque(maxlen=_WINDOW)
        self._noise = 0.3
        self._streak = 0
        self._num_unfitted = 0

    def guess(self, rates: Sequence[float]) -> None:
        """Replace the initial guesses."""
        assert not self.num_noted, "a guess must not replace measurements"
        self.rates = self._anchor = tuple(rates)

    def mean_s(self, terms: Sequence[float]) -> float:
        """Predict the duration of these amounts."""
        total: float = sum(map(mul, self.rates, terms))
        return min(max(total, _SECONDS_MIN), SECONDS_MAX)

    @property
    def looks_faster(self) -> bool:
        """Return whether the last measurement was far below the prediction."""
        return self._streak < 0

    def note(self, terms: tuple[float, ...], seconds: float, now_ns: int) -> bool:
        """Learn from one measurement; returns False if it is invalid."""
        if not (0.0 < seconds <= SECONDS_MAX) or not all(map(is_amount, terms)):
            return False
        seconds = max(float(seconds), _SECONDS_MIN)
        deviation = log(seconds / self.mean_s(terms))
        self._window.append(_Sample(tuple(map(float, terms)), seconds, now_ns))
        self.num_noted += 1
        self.noted_ns = now_ns
        self._num_unfitted += 1
        self._count_streak(deviation)
        if abs(self._streak) >= _CHANGE_STREAK:
            self._forget_earlier()
        elif self._num_unfitted >= min(_REFIT_EVERY, len(self._window) // 2):
            self._refit()
        return True

    def _count_streak(self, deviation: float) -> None:
        """Count consecutive outliers on one side, with the sign of that side."""
        if abs(deviation) < max(_OUTLIER_LOG, 3.0 * self._noise) or len(self._window) <= 1:
            self._streak = 0
        else:
            side = 1 if deviation > 0 else -1
            self._streak = self._streak + side if self._streak * side > 0 else side

    def _forget_earlier(self) -> None:
        """Drop all measurements but those that showed the change."""
        latest = list(self._window)[-_CHANGE_STREAK:]
        self._window.clear()
        self._window.extend(latest)
        self._anchor = self.rates
        self._streak = 0
        self._refit()

    def _refit(self) -> None:
        self._num_unfitted = 0
        terms = np.array([sample.terms for sample in self._window])
        seconds = np.array([sample.seconds for sample in self._window])
        weights = self._weights()
        anchor = self._scaled_anchor(terms, seconds, weights)
        # The first rates are so far off that every measurement would count as an outlier.
        is_first = len(seconds) <= _CHANGE_STREAK
        rates = anchor if is_first else self.rates
        for _ in range(2 if is_first else 1):
            rates = self._solved(terms, seconds, weights, rates, anchor)
        self.rates = rates
        self._measure(terms, seconds)

    def _weights(self) -> _Values:
        """Return the weight of each measurement by age; the clock may have been set back."""
        times_ns = np.array([sample.at_ns for sample in self._window])
        ages_s = (times_ns.max() - times_ns) / 1e9
        num_newer = np.arange(len(times_ns))[::-1]
        half_lives = num_newer / _HALF_LIFE_SAMPLES + np.minimum(ages_s / _HALF_LIFE_S, 10.0)
        weights: _Values = 0.5**half_lives
        return weights

    def _scaled_anchor(self, terms: _Values, seconds: _Values, weights: _Values) -> _Rates:
        """Return the last known shape, scaled to the weighted median of the measurements."""
        ratios = seconds / np.maximum(terms @ self._anchor, _SECONDS_MIN)
        order = ratios.argsort(kind="stable")
        covered = weights[order].cumsum()
        middle = float(ratios[order][covered.searchsorted(covered[-1] / 2)])
        return tuple(
            min(max(rate * middle, limit.lowest), limit.highest)
            for rate, limit in zip(self._anchor, self._limits, strict=True)
        )

    def _solved(
        self, terms: _Values, seconds: _Values, weights: _Values, rates: _Rates, anchor: _Rates
    ) -> _Rates:
        """Return the least-squares rates, with weights by the distance from ``rates``."""
        expected = np.maximum(terms @ rates, _SECONDS_MIN)
        bend = max(0.1, 2.0 * self._noise)
        trust = weights * bend / np.maximum(np.abs(seconds / expected - 1.0), bend)
        scaled = terms / expected[:, None]
        weighted = scaled * trust[:, None]
        matrix, vector = weighted.T @ scaled, weighted.T @ (seconds / expected)
        strength = _PULL / weights.sum() * matrix.diagonal()
        vector += strength * anchor
        matrix[np.diag_indices_from(matrix)] += strength
        return self._descended(matrix.tolist(), vector.tolist(), rates, anchor)

    def _descended(
        self, matrix: list[list[float]], vector: list[float], rates: _Rates, anchor: _Rates
    ) -> _Rates:
        """Solve within the limits by coordinate descent."""
        found = list(rates)
        for _ in range(30):
            moved = 0.0
            for i, (row, limit) in enumerate(zip(matrix, self._limits, strict=True)):
                if row[i] <= 0.0:  # not part of any measurement
                    found[i] = anchor[i]
                    continue
                rest = vector[i] - sum(map(mul, row, found)) + row[i] * found[i]
                value = min(max(rest / row[i], limit.lowest), limit.highest)
                moved = max(moved, abs(value - found[i]) * sqrt(row[i]))
                found[i] = value
            if moved < 1e-3:
                break
        return tuple(found)

    def _measure(self, terms: _Values, seconds: _Values) -> None:
        """Measure the scatter, and the ratio of slow measurements to the prediction."""
        ratios = np.sort(seconds / np.clip(terms @ self.rates, _SECONDS_MIN, SECONDS_MAX))
        count = len(ratios)
        # So few measurements agree by chance, or because the fit passes through them.
        least = 0.0 if count >= 8 else self._noise
        self._noise = max(float(np.sort(np.abs(np.log(ratios)))[count // 2]), least)
        # One slow measurement is not a tail: a read that hung would close the tier for a minute.
        slow = float(ratios[max(min(ceil(0.95 * count) - 1, count - 2), 0)])
        # Few measurements do not show a tail; below eight, part of the guess remains.
        unknown = max(0.0, 1.0 - count / 8)
        self.tail = min(max(slow, self._first_tail**unknown, 1.0), 1e3)

    # Saved state

    def document(self) -> dict[str, Any]:
        """Return the learned state."""
        return {"rates": list(self.rates), "tail": self.tail, "num_noted": self.num_noted}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Restore the learned state of an earlier run; raises ValueError if it is invalid."""
        rates = document.get("rates")
        if not isinstance(rates, list) or len(rates) != len(self._limits):
            raise ValueError(f"expected {len(self._limits)} rates")
        limited = zip(rates, self._limits, strict=True)
        kept = tuple(number(rate, limit.lowest, limit.highest) for rate, limit in limited)
        tail = number(document.get("tail"), 1.0, 1e3)
        self.rates = self._anchor = kept
        # The disk may have been replaced: half of the initial uncertainty returns.
        self.tail = max(tail, sqrt(self._first_tail))


def is_amount(value: float) -> bool:
    """Return whether a value can be a count or a size: finite, not negative, not absurd."""
    return 0.0 <= value <= _AMOUNT_MAX


def number(value: object, lowest: float, highest: float) -> float:
    """Return a number from a document; raises ValueError if it is not one within the bounds."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and lowest <= value <= highest
    ):
        return float(value)
    raise ValueError(f"{value!r:.40} is not a number between {lowest:g} and {highest:g}")


def table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table of a document, empty if absent; raises ValueError if it is not a table."""
    part = document.get(name, {})
    if not isinstance(part, Mapping):
        raise ValueError(f"{name} is not a table")  # noqa: TRY004 the document is wrong, not the caller
    return part
