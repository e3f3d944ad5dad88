"""Duties: an operator takes a slow tier off, as a whole or for writes, and puts one on again.

Theory
------
A tier leaves in steps, so that nothing is lost that need not be: first nothing new is written to
it, or read from it, and what is under way ends (``LAST``); then it is let go (``NONE``), and what
the index has of it is forgotten, some rows at a time, since there may be millions. What still hangs
then is orphaned: it keeps its slots, which it may yet touch, and whatever comes of it is told to
nobody, for it is about a store that is no longer ours.

A tier that comes is empty for the node until it has been told all that the store holds now; only
then is it asked for any of it. So what another daemon did to the store meanwhile cannot matter.
"""

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.index import WAS_DEMOTED
from kvtier.core.residency import Residency
from kvtier.core.table import as_keys
from kvtier.node.flow.load import Loads
from kvtier.node.messages.actions import Action
from kvtier.node.messages.events import (
    BlocksRecovered,
    ConfigureTier,
    ForgetRows,
    MarkUnverified,
    SetAdminState,
)
from kvtier.node.messages.slow_tier import AdminState
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import MISS_BLOCKS

__all__ = ["AdminStates"]


class AdminStates:
    """Changes what lanes are used for, and keeps the index true to it."""

    def __init__(self, cache: Cache, transfers: TierTransfers, loads: Loads) -> None:
        self._cache = cache
        self._transfers = transfers
        self._loads = loads

    def change(self, event: SetAdminState, now_ns: int) -> list[Action]:
        """Use a tier for that from now on. Off duty, loads that wait for it go on without it."""
        lane = self._transfers.lanes[event.tier]
        if event.admin_state is AdminState.ACTIVE and lane.admin_state is not AdminState.ACTIVE:
            self._offer_again(lane)
        lane.admin_state = event.admin_state
        return self._let_go(lane, now_ns) if event.admin_state is AdminState.DETACHED else []

    def expect(self, event: ConfigureTier) -> None:
        """Take the settings of a tier that is off duty, or new; what it holds is told next."""
        name = event.settings.name
        lane = self._transfers.lanes.setdefault(
            name, TransferLane(event.settings, AdminState.DETACHED)
        )
        assert lane.admin_state is AdminState.DETACHED, "a tier is taken off before it is put on"
        lane.tier, lane.is_up = event.settings, True

    def forget(self, event: ForgetRows) -> None:
        """Forget which of some rows a tier that is off duty held."""
        assert self._transfers.lanes[event.tier].admin_state is AdminState.DETACHED
        index = self._cache.index
        rows = np.arange(event.first_row, min(event.end_row, index.extent))
        rows = index.held(rows, event.tier)
        with self._cache.residency_listener.leaving(Fate.DETACHED):
            index.move(rows, event.tier, Residency.ABSENT)
        index.forget_absent(rows)

    def mark_unverified(self, event: MarkUnverified) -> None:
        """Mark some rows of a tier as unverified."""
        index = self._cache.index
        rows = np.arange(event.first_row, min(event.end_row, index.extent))
        rows = rows[index.residency(rows, event.tier) == Residency.READY]
        index.move(rows, event.tier, Residency.UNVERIFIED)

    def recovered(self, event: BlocksRecovered) -> None:
        """Record blocks that a tier was found to hold; some may be known from other tiers."""
        index = self._cache.index
        rows = index.find(as_keys(event.headers["block_hash"].tobytes()))
        is_new = rows < 0
        restored = index.restore(event.headers[is_new], event.tier)
        self._cache.residency_listener.tell_restored(restored, event.tier)
        if is_new.all():
            return
        known = rows[~is_new]
        known = known[index.is_alike(known, event.headers[~is_new])]
        known = known[index.residency(known, event.tier) == Residency.ABSENT]
        index.move(known, event.tier, Residency.READY)

    def _offer_again(self, lane: TransferLane) -> None:
        """Let the tier be offered the blocks that it missed while it was not written to."""
        index = self._cache.index
        rows = np.arange(index.extent)
        rows = rows[index.lacks(rows, lane.tier.name)]
        index.past[rows] &= ~np.uint8(WAS_DEMOTED)

    def _let_go(self, lane: TransferLane, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for row in self._transfers.orphan(lane):
            actions += self._loads.block_stuck(row, Fate.DETACHED)
        for row in self._transfers.shed(lane):
            self._cache.metrics.add(MISS_BLOCKS, tier=lane.tier.name, reason="fault")
            actions += self._loads.block_missed(row, Fate.DETACHED, now_ns)
        lane.purging = None  # nobody will tell of its end
        return actions
