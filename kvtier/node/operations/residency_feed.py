"""Residency feeds: report the blocks of a key space in each tier, and all changes, to clients.

Theory
------
A feed is read at its reader's pace. It starts with the present blocks, a range of index rows at a
time. Changes of rows that were reported already are queued in order; other rows are reported later,
in their state at that time. So a reader that takes each change as "is there now" or "is gone now"
ends with the state of the index, whenever it reads.

The queue of a slow reader is bounded: beyond the bound the feed discards it and starts again, so a
reader may be behind, but is never wrong. Without readers there is no cost.

A tier that is out counts as empty: nothing can be loaded from it.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.identity import Selection
from kvtier.core.index import BlockIndex
from kvtier.core.limits import FEED_BLOCKS_MAX, FEED_ROWS_AT_ONCE
from kvtier.core.residency import LOWER_TIERS, Residency, TierName
from kvtier.core.residency_change import RESYNC, ResidencyChange
from kvtier.core.table import Rows

__all__ = ["ResidencyFeed", "ResidencyFeeds"]


class ResidencyFeed:
    """The changes for one reader; ``on_news`` is called when there is something to take."""

    def __init__(
        self,
        index: BlockIndex,
        key_space: bytes,
        is_up: Callable[[TierName], bool],
        on_news: Callable[[], None],
    ) -> None:
        self.key_space = key_space
        self._index = index
        self._is_up = is_up
        self._on_news = on_news
        self._waiting: deque[ResidencyChange] = deque()
        self._num_waiting = 0
        self._next_row: int | None = None
        """First row not reported yet; None if all were."""
        self.begin()

    def begin(self) -> None:
        """Start again: discard what was reported, and report all present blocks."""
        self._waiting.clear()
        self._waiting.append(RESYNC)
        self._num_waiting = 0
        self._next_row = 0
        self._on_news()

    def note(self, rows: Rows, tier: TierName, *, is_there: bool) -> None:
        """Report a change of rows of this key space; rows not reported yet are left for later."""
        if self._next_row is not None:
            rows = rows[rows < self._next_row]
        if not len(rows):
            return
        if self._num_waiting + len(rows) > FEED_BLOCKS_MAX:
            self.begin()
            return
        self._waiting.append(ResidencyChange(tier, is_there, self._index.keys_of(rows)))
        self._num_waiting += len(rows)
        self._on_news()

    @property
    def has_news(self) -> bool:
        """Return whether there is more to take."""
        return bool(self._waiting) or self._next_row is not None

    def take(self) -> list[ResidencyChange]:
        """Take the next changes, in order; may be empty although more follow."""
        if not self._waiting and self._next_row is not None:
            return self._look(self._next_row)
        taken, num_blocks = list[ResidencyChange](), 0
        while self._waiting and num_blocks < FEED_ROWS_AT_ONCE:
            taken.append(self._waiting.popleft())
            num_blocks += len(taken[-1].keys)
        self._num_waiting -= num_blocks
        return taken

    def _look(self, first: int) -> list[ResidencyChange]:
        """Return the blocks in the next rows, by tier."""
        index, end = self._index, min(first + FEED_ROWS_AT_ONCE, self._index.extent)
        self._next_row = end if end < index.extent else None
        rows: Rows = np.arange(first, end)
        found = list[ResidencyChange]()
        for tier in filter(self._is_up, LOWER_TIERS):
            ready = rows[index.residency(rows, tier) == Residency.READY]
            ready = index.selected(ready, Selection(self.key_space))
            if len(ready):
                found.append(ResidencyChange(tier, is_there=True, keys=index.keys_of(ready)))
        return found


class ResidencyFeeds:
    """All open feeds of a node. Listens to the index while there are any."""

    def __init__(self, index: BlockIndex, is_up: Callable[[TierName], bool]) -> None:
        self._index = index
        self._is_up = is_up
        self._feeds: list[ResidencyFeed] = []

    def open(self, key_space: bytes, on_news: Callable[[], None]) -> ResidencyFeed:
        """Return a new feed, which starts with all present blocks."""
        if not self._feeds:
            self._index.add_listener(self._moved)
        feed = ResidencyFeed(self._index, key_space, self._is_up, on_news)
        self._feeds.append(feed)
        return feed

    def close(self, feed: ResidencyFeed) -> None:
        """End a feed."""
        self._feeds.remove(feed)
        if not self._feeds:
            self._index.remove_listener(self._moved)

    def begin(self) -> None:
        """Restart all feeds: a tier went up or down, or the index changed without an event."""
        for feed in self._feeds:
            feed.begin()

    def _moved(
        self, rows: Rows, tier: TierName, before: npt.NDArray[np.uint8], state: Residency
    ) -> None:
        is_there = state == Residency.READY
        changed = rows[(before == Residency.READY) != is_there]
        if not len(changed) or not self._is_up(tier):
            return
        scopes = self._index.scope[changed]
        if (scopes == scopes[0]).all():  # all moves except drops and evictions
            self._tell(changed, tier, is_there=is_there)
            return
        for scope in np.unique(scopes):
            self._tell(changed[scopes == scope], tier, is_there=is_there)

    def _tell(self, rows: Rows, tier: TierName, *, is_there: bool) -> None:
        """Report rows of one scope."""
        key_space = self._index.scope_of(int(rows[0])).key_space
        for feed in self._feeds:
            if feed.key_space == key_space:
                feed.note(rows, tier, is_there=is_there)
