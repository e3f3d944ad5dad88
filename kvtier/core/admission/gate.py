"""A gate that admits a fixed share of blocks, those with the best scores.

Theory
------
A fixed threshold for the predicted reuse drifts: a score that is good in the morning is poor at
noon. So the share is fixed and the threshold follows: each block moves it by a small step times
(written - share), which makes it the quantile of the recent scores (Robbins and Monro, 1951). A
block that had to be written, because its child would be lost without it, counts as written: without
it, the share would be exceeded by a fifth on conversations, and several times over on agents.

A write budget lowers the share to the ratio of permitted to offered bytes. If many blocks have the
same score, the threshold settles among them, and their hashes decide: the answer for a block is
then the same each time.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvtier.core.cost.fit import number
from kvtier.core.identity import BlockHash

__all__ = ["QuantileGate"]

_STEP = 0.0003
"""Step of the threshold, for scores from 0 to 1: 3,000 blocks from one end to the other. Larger
steps follow the noise, smaller ones are too slow (measured on a day of conversations)."""

_FIRST_STEP = 0.05
_FIRST_BLOCKS = 10
"""The first steps are larger, and fall as one over the number of blocks."""

_JUDGED_MAX = 10**6
"""Upper bound of the count: the steps have long reached their minimum by then."""

_TIE = 0.01
"""How far apart the hashes move blocks with the same score."""

_THRESHOLD_MAX = 1.0 + 2 * _TIE
"""Above every score, so that a gate can close; no higher, so that it reopens soon."""

_RATE_WINDOW_S = 60.0
"""Averaging time for the rate of offered bytes."""


class QuantileGate:
    """Admits ``most_share`` of the offered blocks, or less if a budget requires it."""

    def __init__(self, most_share: float) -> None:
        self.threshold = 0.0
        """Blocks with this score or better pass."""
        self.num_offered = 0
        self.num_taken = 0
        self.most_share = most_share
        """Admitted share if there is no budget."""
        self._num_before = 0
        """Number of blocks decided in earlier runs."""
        self._allowance: float | None = None
        """Write budget in bytes per second."""
        self._offered_bytes = 0.0
        """Exponentially weighted sum over the last window."""
        self._seen_ns: int | None = None

    @property
    def share(self) -> float:
        """Return the share that passes at present."""
        if self._allowance is None or not self._offered_bytes:
            return self.most_share
        offered_bytes_per_s = self._offered_bytes / _RATE_WINDOW_S
        return min(self.most_share, self._allowance / offered_bytes_per_s)

    def note_allowance(self, bytes_per_s: float | None) -> None:
        """Set the write budget in bytes per second; None: unlimited."""
        self._allowance = bytes_per_s

    def would_take(self, score: float, key: BlockHash) -> bool:
        """Return whether a block would pass. Changes nothing."""
        return self.share > 0 and score + _TIE * _fraction(key) >= self.threshold

    def take(self, score: float, key: BlockHash, *, num_bytes: int, now_ns: int) -> bool:
        """Decide about an offered block, and move the threshold."""
        self._note_offered(num_bytes, now_ns)
        is_taken = self.would_take(score, key)
        self._move(is_taken=is_taken)
        return is_taken

    def take_needed(self, *, num_bytes: int, now_ns: int) -> None:
        """Count a block that is written regardless of its score."""
        self._note_offered(num_bytes, now_ns)
        self._move(is_taken=True)

    def _note_offered(self, num_bytes: int, now_ns: int) -> None:
        seen_ns = now_ns if self._seen_ns is None else self._seen_ns
        elapsed_s = max(0, now_ns - seen_ns) / 1e9
        self._seen_ns = max(now_ns, seen_ns)
        self._offered_bytes *= math.exp(-elapsed_s / _RATE_WINDOW_S)
        self._offered_bytes += num_bytes

    def _move(self, *, is_taken: bool) -> None:
        num_judged = self._num_before + self.num_offered
        step = max(_STEP, _FIRST_STEP / (1 + num_judged / _FIRST_BLOCKS))
        moved = self.threshold + step * (is_taken - self.share)
        self.threshold = min(max(0.0, moved), _THRESHOLD_MAX)
        self.num_offered += 1
        self.num_taken += is_taken

    # Saved state

    def document(self) -> dict[str, float]:
        """Return the threshold, and the number of blocks behind it."""
        num_judged = min(self._num_before + self.num_offered, _JUDGED_MAX)
        return {"threshold": self.threshold, "num_judged": num_judged}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Continue from an earlier run; raises ValueError if the document is invalid."""
        threshold = number(document.get("threshold"), 0.0, _THRESHOLD_MAX)
        self._num_before = int(number(document.get("num_judged"), 0, _JUDGED_MAX))
        self.threshold = threshold


def _fraction(key: BlockHash) -> float:
    """Return a number from 0 to 1 derived from the block hash, which is uniform."""
    return int.from_bytes(key[:4], "little") / 2**32
