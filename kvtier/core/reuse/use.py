"""A use: a request's chain and hints, and which tenants have traffic classes of their own."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

from kvtier.core.identity import NO_TENANT, BlockHash
from kvtier.core.limits import TENANTS_COUNTED_MAX
from kvtier.core.request import NO_TRAITS, RequestTraits

__all__ = ["LENGTH_TOKENS", "SavedSeconds", "TenantHints", "TouchResult", "Use"]

LENGTH_TOKENS = 512
"""The new parts of requests are classified by powers of two times this length."""

_SOON_S, _LATER_S = 60.0, 600.0
"""Bounds of the classes of ``gap_s``: at once, within a conversation, later."""


_VALUE_RATIO_MAX = 1024.0
"""Upper bound of the value of a hit relative to the first block: that of a prompt of 30 million
tokens at the usual slope."""

_VALUE_EXPONENT = 0.5
"""Halfway between counting hits and seconds: a run is valued by its end, which is worth more than
its front. On the first half of the conversation trace, with 4,000 blocks, exponents of 0, 0.5 and 1
hit 14.9, 14.4 and 13.2 % of the tokens and save 13.1, 13.4 and 12.8 % of the seconds."""

SavedSeconds = Callable[[int, int], float]
"""Seconds that a hit on a block saves, from the tokens up to its end and those of a block."""


@dataclass(frozen=True, slots=True)
class Use:
    """A request's chain and traits."""

    keys: Sequence[BlockHash]
    """Hashes of its full blocks, from the root on; unique across tenants and key spaces."""
    payload_bytes: int
    block_tokens: int
    tenant: bytes = NO_TENANT
    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks from this index on hold generated tokens; -1: none does."""

    def length(self, num_blocks: int) -> int:
        """Return the length class of a number of blocks: the bit length of its size in tokens."""
        return (num_blocks * self.block_tokens // LENGTH_TOKENS).bit_length()

    def hit_value(self, end: int, saved_s: SavedSeconds | None) -> int:
        """Return the value per byte of a hit on the block before ``end``, in half octaves.

        Without ``saved_s``, all tokens have equal value. The value is relative to a first block:
        measurements may be off by orders of magnitude in the beginning, and early and late runs
        are compared.
        """
        worth = float(self.block_tokens)
        if saved_s is not None:
            first_s = saved_s(self.block_tokens, self.block_tokens)
            end_s = saved_s(end * self.block_tokens, self.block_tokens)
            if first_s > 0:
                ratio = min(max(end_s / first_s, 1.0), _VALUE_RATIO_MAX)
                worth *= ratio**_VALUE_EXPONENT
        return round(2 * log2(worth / max(self.payload_bytes, 1)))

    @property
    def hint(self) -> int:
        """Return the class of the client's hints about the future; 0: no hint."""
        continues, gap_s = self.traits.continues, self.traits.gap_s
        if continues is None and gap_s is None:
            return 0
        if continues is not None and continues < 0.75:
            return 1 if continues < 0.25 else 2
        if gap_s is None:
            return 3
        return 4 + (gap_s > _SOON_S) + (gap_s > _LATER_S)


@dataclass(frozen=True, slots=True)
class TouchResult:
    """What was known about a chain before a use."""

    num_known: int
    """Number of leading blocks that were resident or ghosts."""
    turn: int
    """0: the chain is new, or only shares a prefix with many; 1: its second turn, and so on."""
    times_seen: int
    """How often the last known block was requested before."""


_HINTS_MIN = 500.0
"""Recent hints of a tenant. Fewer are too little evidence: they fall into dozens of classes."""

_HALF_LIFE_HINTS = 7000.0
"""The half-life of the reuse counts. It limits the tenants with own classes to twenty at a time."""

_WEIGHT_MAX = 2.0**64


class TenantHints:
    """Counts hints by tenant, with decay, to find tenants with enough of them.

    A hint is a traffic class like any other: the reuse that follows shows what it is worth. If all
    tenants shared one class, one that lies would discredit the others. So a tenant that often sends
    hints has its own classes; for one that seldom does, there would be too little evidence.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, float] = OrderedDict()
        """By tenant, in units of the initial weight; the most recent tenant is last."""
        self._weight = 1.0
        """Weight of a hint now. It grows, so that older counts need not be reduced each time."""

    def note(self, use: Use) -> None:
        """Count a request that has a tenant and a hint."""
        if not use.hint or use.tenant == NO_TENANT:
            return
        self._weight *= 2.0 ** (1 / _HALF_LIFE_HINTS)
        self._counts[use.tenant] = self._counts.get(use.tenant, 0.0) + self._weight
        self._counts.move_to_end(use.tenant)
        if len(self._counts) > TENANTS_COUNTED_MAX:
            self._counts.popitem(last=False)
        if self._weight > _WEIGHT_MAX:
            self._counts = OrderedDict((k, n / self._weight) for k, n in self._counts.items())
            self._weight = 1.0

    def alone(self, use: Use) -> bytes:
        """Return the tenant if it has classes of its own, else ``b""``."""
        is_known = use.hint and self._counts.get(use.tenant, 0.0) >= _HINTS_MIN * self._weight
        return use.tenant if is_known else b""
