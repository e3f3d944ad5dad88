"""Whose hints are believed by themselves: tenants that have said enough to be judged alone.

A hint is a class of traffic like any other: what comes back after it shows what it is worth. Were
all tenants in one class, one that lies would spoil the word of the others. So a tenant that hints
often has classes of its own; of one that seldom does too little would be known.
"""

from collections import OrderedDict

from kvtier.core.identity import NO_TENANT
from kvtier.core.limits import TENANTS_COUNTED_MAX
from kvtier.core.reuse.use import Use

__all__ = ["TenantHints"]

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
