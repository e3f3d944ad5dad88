"""Determines the fate of each block that was requested and not served, and counts it once."""

from collections import Counter
from collections.abc import Sequence

from kvtier.core.fate import Fate
from kvtier.core.identity import BlockHash, split_hashes
from kvtier.core.residency import LOWER_TIERS, Residency
from kvtier.core.reuse.history import History
from kvtier.core.slow_tier import AdminState
from kvtier.core.table import Rows
from kvtier.node.state.block_run import BlockRun, PromptChain
from kvtier.node.state.cache import Cache
from kvtier.node.state.decision_log import DecisionLog
from kvtier.node.state.transfer import TierTransfers
from kvtier.observe.daemon_metrics import MISSED_BLOCKS

__all__ = ["MissFates"]


class MissFates:
    """Looks up fates in the history, unless the node's state determines them."""

    def __init__(
        self,
        cache: Cache,
        transfers: TierTransfers,
        history: History | None,
        decision_log: DecisionLog,
    ) -> None:
        self._cache = cache
        self._transfers = transfers
        self._history = history
        self._decision_log = decision_log

    def of_lookup(
        self,
        chain: PromptChain,
        gap: int,
        run: BlockRun,
        num_known: int,
        *,
        is_late: bool,
        now_ns: int,
    ) -> Counter[Fate]:
        """Return the fates of a chain's blocks from ``gap`` on, where the found run ends.

        ``num_known`` leading blocks were known before this request. A block that some tier has,
        behind one that is missing, shares the fate of the missing one. ``is_late``: the shared
        tier, which may have the others, did not answer in time.
        """
        if not len(chain.keys):
            return Counter({Fate.TOO_SHORT: 1})
        num_missing = len(chain.keys) - gap
        if run.reason == "identity":
            return Counter({Fate.IDENTITY: num_missing})
        if not num_missing:
            return Counter()
        rows = self._cache.index.find(chain.keys[gap:])
        unserved = self._unserved(int(rows[0]), chain, now_ns)
        unknown = Fate.DEADLINE if is_late else Fate.NEVER_STORED
        unoffered = Fate.DEADLINE if is_late else Fate.NOT_OFFERED
        known = split_hashes(chain.keys[gap : max(gap, num_known)].tobytes())
        remembered = self._remembered(known, unoffered)
        at_gap = unserved or (remembered[0] if remembered else unknown)
        is_there = self._is_there(rows)
        is_there[0] = True  # so that it counts like the blocks behind it
        fates = Counter({at_gap: int(is_there.sum())})
        fates.update(
            fate
            for fate, is_behind in zip(remembered, is_there.tolist(), strict=False)
            if not is_behind
        )
        fates[unknown] += num_missing - fates.total()
        return +fates

    def count(self, fates: Counter[Fate]) -> None:
        """Count the misses of a lookup."""
        for fate, count in fates.items():
            self._cache.metrics.add(MISSED_BLOCKS, count, fate=fate)

    def count_load(self, decision: int, fate: Fate, num_blocks: int) -> None:
        """Count blocks that a load should have brought and did not."""
        self._cache.metrics.add(MISSED_BLOCKS, num_blocks, fate=fate)
        self._decision_log.add_missed(decision, fate, num_blocks)

    def _is_there(self, rows: Rows) -> Rows:
        state = self._cache.index.facts(rows)["state"]
        is_there: Rows = ((state == Residency.READY) & (rows >= 0)[:, None]).any(axis=1)
        return is_there

    def _unserved(self, row: int, chain: PromptChain, now_ns: int) -> Fate | None:
        """Return why a block is not served although some tier has it; None if none has it."""
        if row < 0:
            return None
        having = [t for t in LOWER_TIERS if self._cache.state(row, t) == Residency.READY]
        lanes = [self._transfers.lanes[t] for t in having if t in self._transfers.lanes]
        if not having:
            return None
        if self._cache.is_closed(chain.scope) or any(lane.is_closed(chain.scope) for lane in lanes):
            return Fate.DROPPED
        if all(lane.is_usable(now_ns) for lane in lanes):
            return None
        is_off = all(
            lane.admin_state in {AdminState.DETACHING, AdminState.DETACHED} for lane in lanes
        )
        return Fate.DETACHED if is_off else Fate.TIER_DOWN

    def _remembered(self, keys: Sequence[BlockHash], unoffered: Fate) -> list[Fate]:
        """Return the fates of blocks that were requested before."""
        if self._history is None or not keys:
            return []
        fates = self._history.fates(keys)
        return [unoffered if fate is Fate.NEVER_STORED else fate for fate in fates]
