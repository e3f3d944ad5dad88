"""Administrative states: attaches and detaches tiers while requests run.

Theory
------
A tier is detached in steps, so that nothing is lost needlessly. First no new reads or
writes start, and those in flight end (``DETACHING``). Then the tier is given up (``DETACHED``), and
its blocks are forgotten, a range of rows at a time, since there may be millions. Transfers that
still hang are orphaned: they keep their slots, which they may yet touch, and their completions have
no effect, because the device is no longer ours.

A tier that is attached counts as empty until all its contents have been reported; only then is it
read. So it does not matter what another daemon wrote to the device meanwhile.
"""

import numpy as np

from kvtier.core.fate import Fate
from kvtier.core.index import WAS_DEMOTED
from kvtier.core.residency import Residency
from kvtier.core.slow_tier import AdminState
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
from kvtier.node.state.cache import Cache
from kvtier.node.state.transfer import TierTransfers, TransferLane
from kvtier.observe.daemon_metrics import MISS_BLOCKS

__all__ = ["AdminStates"]


class AdminStates:
    """Changes the states of lanes, and keeps the index consistent with them."""

    def __init__(self, cache: Cache, transfers: TierTransfers, loads: Loads) -> None:
        self._cache = cache
        self._transfers = transfers
        self._loads = loads

    def change(self, event: SetAdminState, now_ns: int) -> list[Action]:
        """Change a tier's state. If it is detached, loads that wait for it go on without it."""
        lane = self._transfers.lanes[event.tier]
        if event.admin_state is AdminState.ACTIVE and lane.admin_state is not AdminState.ACTIVE:
            self._offer_again(lane)
        lane.admin_state = event.admin_state
        return self._let_go(lane, now_ns) if event.admin_state is AdminState.DETACHED else []

    def configure(self, event: ConfigureTier, _now_ns: int) -> None:
        """Set the settings of a detached or new tier; its contents are reported next."""
        name = event.settings.name
        lane = self._transfers.lanes.setdefault(
            name, TransferLane(event.settings, AdminState.DETACHED)
        )
        assert lane.admin_state is AdminState.DETACHED, "a tier is detached before it is attached"
        lane.tier, lane.is_up = event.settings, True

    def forget(self, event: ForgetRows, _now_ns: int) -> None:
        """Forget that a detached tier held the blocks in a range of rows."""
        assert self._transfers.lanes[event.tier].admin_state is AdminState.DETACHED
        index = self._cache.index
        rows = np.arange(event.first_row, min(event.end_row, index.extent))
        rows = index.held(rows, event.tier)
        with self._cache.residency_listener.leaving(Fate.DETACHED):
            index.move(rows, event.tier, Residency.ABSENT)
        index.forget_absent(rows)

    def mark_unverified(self, event: MarkUnverified, _now_ns: int) -> None:
        """Mark a range of a tier's rows as unverified."""
        index = self._cache.index
        rows = np.arange(event.first_row, min(event.end_row, index.extent))
        rows = rows[index.residency(rows, event.tier) == Residency.READY]
        index.move(rows, event.tier, Residency.UNVERIFIED)

    def recovered(self, event: BlocksRecovered) -> None:
        """Record blocks found in a tier; other tiers may have some of them."""
        index = self._cache.index
        rows = index.find(as_keys(event.headers["block_hash"].tobytes()))
        is_new = rows < 0
        restored = index.restore(event.headers[is_new], event.tier)
        self._cache.residency_listener.report_restored(restored, event.tier)
        if is_new.all():
            return
        known = rows[~is_new]
        known = known[index.is_alike(known, event.headers[~is_new])]
        known = known[index.residency(known, event.tier) == Residency.ABSENT]
        index.move(known, event.tier, Residency.READY)

    def _offer_again(self, lane: TransferLane) -> None:
        """Clear the marks of blocks that were offered while the tier took no writes."""
        index = self._cache.index
        rows = np.arange(index.extent)
        rows = rows[index.lacks(rows, lane.tier.name)]
        index.flags[rows] &= ~np.uint8(WAS_DEMOTED)

    def _let_go(self, lane: TransferLane, now_ns: int) -> list[Action]:
        actions: list[Action] = []
        for row in self._transfers.orphan(lane):
            actions += self._loads.block_stuck(row, Fate.DETACHED)
        for row in self._transfers.shed(lane):
            self._cache.metrics.add(MISS_BLOCKS, tier=lane.tier.name, reason="fault")
            actions += self._loads.block_missed(row, Fate.DETACHED, now_ns)
        lane.purging = None  # its end will not be reported
        return actions
