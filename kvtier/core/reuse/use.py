"""A use: what one request tells of its chain, and what was known of it before."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import TENANTS_COUNTED_MAX
from kvtier.core.request import NO_TRAITS, RequestTraits

__all__ = ["LENGTH_TOKENS", "TenantHints", "TouchResult", "Use"]

LENGTH_TOKENS = 512
"""New parts of requests are told apart by powers of two from here on."""

_SOON_S, _LATER_S = 60.0, 600.0
"""Where hints of when a chain comes back are told apart: at once, in a conversation, some time."""


@dataclass(frozen=True, slots=True)
class Use:
    """One request's chain, whoever answers it."""

    keys: Sequence[bytes]
    """Block hashes of its full blocks, from the root on; unique across tenants and key spaces."""
    payload_bytes: int
    block_tokens: int
    tenant: bytes = NO_TENANT
    traits: RequestTraits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks from this one on hold generated tokens; -1: none does."""

    def length(self, num_blocks: int) -> int:
        """Return how long so many blocks are, as the number of bits of a length in tokens."""
        return (num_blocks * self.block_tokens // LENGTH_TOKENS).bit_length()

    @property
    def hint(self) -> int:
        """Return what the client says of the chain's future, coarsely; 0: nothing."""
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
    """What was remembered of a chain before a use of it."""

    num_known: int
    """Leading blocks, resident or ghosts."""
    turn: int
    """0: it is new, or known is only what many chains share; 1: its second turn, and so on."""
    times_seen: int
    """How often the last known block was named before."""


_HINTS_MIN = 500.0
"""Lately: fewer say little of each of the dozens of classes that they fall into."""

_HALF_LIFE_HINTS = 7000.0
"""As for the counts of what came back. At most twenty tenants are judged alone at a time, then."""

_WEIGHT_MAX = 2.0**64


class TenantHints:
    """Counts hints by tenant; older ones weigh less."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, float] = OrderedDict()
        """In units of the weight of a hint when counting began; who hinted last is last."""
        self._weight = 1.0
        """Of a hint now: it grows, so that not all counts have to shrink each time."""

    def note(self, use: Use) -> None:
        """Count a request, if it has a tenant and says something of its future."""
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
        """Return the tenant if its hints are judged by themselves, else nothing."""
        is_known = use.hint and self._counts.get(use.tenant, 0.0) >= _HINTS_MIN * self._weight
        return use.tenant if is_known else b""
