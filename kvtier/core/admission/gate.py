"""The gate before a tier whose writes are dear: it lets the best share of blocks through.

Theory
------
A fixed threshold of predicted reuse drifts: what is good traffic in the morning is poor at noon.
So the share is fixed and the threshold follows: after each block it moves by a small step times
(written - share), which makes it the quantile of what came lately (Robbins and Monro, 1951). A
block that had to be written, because its child would be lost without it, counts as written: left
out, the share would be overshot by a fifth on conversations, and several times over on agents.

A write budget lowers the share to what may be written over what is offered. Where many blocks have
the same score the threshold settles among them, and their hashes say which go through: then the
answer for a block is the same each time it is asked.
"""

import math
from collections.abc import Mapping
from typing import Any

from kvtier.core.cost.fit import number

__all__ = ["QuantileGate"]

_STEP = 0.0003
"""Of the threshold, for scores from 0 to 1: 3,000 blocks from one end to the other. Larger ones
follow the noise, smaller ones a change too late (measured on a day of conversations)."""

_FIRST_STEP = 0.05
_FIRST_BLOCKS = 10
"""Begins with larger steps, which fall as one over the blocks seen: nothing is known yet."""

_JUDGED_MAX = 10**6
"""Where one stops to count: by far the steps are the smallest then."""

_TIE = 0.01
"""How far apart the hashes of blocks with the same score move them."""

_THRESHOLD_MAX = 1.0 + 2 * _TIE
"""Above each score, so that a gate can be shut; no higher, so that it opens again soon."""

_RATE_WINDOW_S = 60.0
"""What is offered a second is averaged over so long."""


class QuantileGate:
    """Lets ``most_share`` of what is offered through, or less where a budget says so."""

    def __init__(self, most_share: float) -> None:
        self.threshold = 0.0
        """Blocks of this score and better go through."""
        self.num_offered = 0
        self.num_taken = 0
        self.most_share = most_share
        """Of what is offered, where there is no budget."""
        self._num_before = 0
        """Blocks that an earlier run has judged."""
        self._allowance: float | None = None
        """Bytes a second that may be written."""
        self._offered_bytes = 0.0
        """In the last window, older ones weighing less."""
        self._seen_ns: int | None = None

    @property
    def share(self) -> float:
        """Return the share that goes through just now."""
        if self._allowance is None or not self._offered_bytes:
            return self.most_share
        offered_bytes_per_s = self._offered_bytes / _RATE_WINDOW_S
        return min(self.most_share, self._allowance / offered_bytes_per_s)

    def note_allowance(self, bytes_per_s: float | None) -> None:
        """Take what may be written a second; None: as much as there is."""
        self._allowance = bytes_per_s

    def would_take(self, score: float, key: bytes) -> bool:
        """Tell whether a block would go through; changes nothing."""
        return self.share > 0 and score + _TIE * _fraction(key) >= self.threshold

    def take(self, score: float, key: bytes, *, num_bytes: int, now_ns: int) -> bool:
        """Judge a block that is offered, and move the threshold after it."""
        self._note_offered(num_bytes, now_ns)
        is_taken = self.would_take(score, key)
        self._move(is_taken=is_taken)
        return is_taken

    def take_needed(self, *, num_bytes: int, now_ns: int) -> None:
        """Count a block that is written whatever it is worth."""
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

    # Across restarts

    def document(self) -> dict[str, float]:
        """Return where the threshold is, and after how many blocks."""
        num_judged = min(self._num_before + self.num_offered, _JUDGED_MAX)
        return {"threshold": self.threshold, "num_judged": num_judged}

    def recall(self, document: Mapping[str, Any]) -> None:
        """Begin where an earlier run ended; raises ValueError where that is no such document."""
        threshold = number(document.get("threshold"), 0.0, _THRESHOLD_MAX)
        self._num_before = int(number(document.get("num_judged"), 0, _JUDGED_MAX))
        self.threshold = threshold


def _fraction(key: bytes) -> float:
    """Return a number from 0 to 1 that is a block's own; hashes are uniform already."""
    return int.from_bytes(key[:4], "little") / 2**32
