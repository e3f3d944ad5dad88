"""Which blocks of a tier are the next to leave it, and which are worth more than those."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence

from kvtier.core.residency import LOWER_TIERS, TierName
from kvtier.core.reuse.block import NO_ROW, RememberedBlocks
from kvtier.core.reuse.hazard import Hazards
from kvtier.core.reuse.order import Density, Ranking, TierOrder
from kvtier.core.reuse.run import NONE, Runs
from kvtier.core.reuse.use import Use
from kvtier.core.slots import slot_bytes

__all__ = ["COLUMN", "TierOrders"]

COLUMN: Mapping[TierName, int] = {tier: column for column, tier in enumerate(LOWER_TIERS)}
"""Where what is known by tier has a tier's part."""


class TierOrders:
    """One for each tier and slot size, made when it is first asked for; they change nothing."""

    def __init__(
        self,
        blocks: RememberedBlocks,
        runs: Runs,
        hazards: Hazards,
        by_tokens: Collection[TierName],
    ) -> None:
        """In the tiers ``by_tokens`` all tokens are worth the same."""
        self._blocks = blocks
        self._runs = runs
        self._hazards = hazards
        self._by_tokens = {COLUMN[tier] for tier in by_tokens}
        self._rankings: dict[int, Ranking] = {}
        self._orders: dict[tuple[int, int], TierOrder] = {}
        """By tier and slot size."""

    def rank(self, tier: TierName, ranking: Ranking) -> None:
        """Have the blocks of a tier leave by another order than that of density."""
        assert not self._orders, "before anything is there"
        self._rankings[COLUMN[tier]] = ranking

    def of(self, column: int, size: int) -> TierOrder:
        """Return the order in which blocks in slots of a size leave a tier, given by its column."""
        order = self._orders.get((column, size))
        if order is None:
            ranking = self._rankings.get(column) or self._density(column)
            order = self._orders[column, size] = TierOrder(
                self._blocks, self._runs, column, ranking
            )
        return order

    def scores(self, keys: Sequence[bytes], tier: TierName = TierName.SSD) -> list[float]:
        """Return what each block earns in a tier: expected value per byte and second.

        The larger the better; 0.0 where it is not remembered.
        """
        blocks, runs, density = self._blocks, self._runs, self._density(COLUMN[tier])
        runs_of = (
            int(blocks.run[row]) if row != NO_ROW else NONE for row in blocks.find(keys).tolist()
        )
        return [density.score(runs, run) if run != NONE else 0.0 for run in runs_of]

    def victims(
        self,
        tier: TierName,
        payload_bytes: int,
        is_spared: Callable[[bytes], bool] | None = None,
    ) -> Generator[bytes, None, None]:
        """Yield the next blocks of a tier to go, tails first, none with a child in the tier.

        For slots that take a payload of that size. Let a block ``leave`` before asking for the
        next: one that is still there then stays, with all it hangs on.
        """
        blocks, column = self._blocks, COLUMN[tier]

        def is_kept(row: int) -> bool:
            return is_spared is not None and is_spared(blocks.key(row))

        walk = self.of(column, slot_bytes(payload_bytes)).walk(is_kept)
        try:
            _, row = next(walk)
            while True:
                yield blocks.key(row)
                _, row = walk.send(not blocks.where[row] & (1 << column))
        except StopIteration:
            return
        finally:
            walk.close()

    def next_out(
        self, tier: TierName, size: int, is_spared: Callable[[int], bool]
    ) -> Generator[int, None, None]:
        """Yield the same for slots of a size, by their numbers, as if all yielded before had gone.

        Those for whose number ``is_spared`` holds stay.
        """
        number = self._blocks.number
        walk = self.of(COLUMN[tier], size).walk(lambda row: is_spared(int(number[row])))
        for _, row in walk:
            yield int(number[row])

    def would_stay(self, use: Use, num_blocks: int, tier: TierName) -> int:
        """Return how many of a chain's next ``num_blocks`` blocks are worth what they push out.

        Those that the tier lacks, from the root on, each of which would push one out.
        """
        blocks, column = self._blocks, COLUMN[tier]
        order = self.of(column, slot_bytes(use.payload_bytes))
        rows = blocks.find(use.keys).tolist()
        own = set(rows)
        lacking = (row for row in rows if row == NO_ROW or not blocks.where[row] & (1 << column))
        victims = order.walk(own.__contains__)
        num_staying = 0
        for row, (score, _) in zip(lacking, victims, strict=False):
            if num_staying == num_blocks:
                break
            if row != NO_ROW and order.score(int(blocks.run[row])) <= score:
                break
            num_staying += 1
        else:
            num_staying = num_blocks  # nothing is left to be pushed out
        victims.close()
        return num_staying

    def _density(self, column: int) -> Density:
        """Return the ranking of a tier that was given no other."""
        is_plain = column in self._by_tokens
        values = self._runs.plain_value if is_plain else self._runs.value
        return Density(self._hazards, values, self._runs.count[column + 1 :])
