"""How operators change what tiers are used for: the call, and who does it."""

from typing import Protocol

from kvtier.client.wire import tier_from_wire
from kvtier.core.residency import TierName
from kvtier.errors import StartError
from kvtier.tiers.base import Health
from kvtier.v1 import operator_pb2 as pb

__all__ = ["TierAdminCalls", "change_tier"]

_WAIT_MS_MAX = 86_400_000


class TierAdminCalls(Protocol):
    """Each verb waits at most so long, and tells whether all is done. Raises StartError."""

    async def drain(self, name: TierName, wait_s: float) -> bool:
        """Write nothing new to a tier."""

    async def resume(self, name: TierName) -> bool:
        """Use a drained tier as before."""

    async def detach(self, name: TierName, wait_s: float, *, is_now: bool = False) -> bool:
        """Take a tier off."""

    async def attach(self, name: TierName, wait_s: float) -> bool:
        """Use a tier as it is configured now."""

    def health(self, name: TierName) -> Health | None:
        """Return how a tier does, or what was made of it; None: it is off."""


async def change_tier(
    tier_admin: TierAdminCalls, request: pb.ChangeTierRequest
) -> pb.ChangeTierReply:
    """Do as a request says; a refusal is part of the reply. Raises KeyError for no tier."""
    name, wait_s = tier_from_wire(request.tier), min(request.wait_ms, _WAIT_MS_MAX) / 1000
    try:
        is_done = await _changed(tier_admin, name, request, wait_s)
    except StartError as refusal:
        return pb.ChangeTierReply(
            refusal=pb.ChangeTierReply.Refusal(
                field=refusal.field, problem=refusal.problem, remedy=refusal.remedy
            )
        )
    health = tier_admin.health(name)
    if health is None:
        return pb.ChangeTierReply(done=is_done, state="off")
    return pb.ChangeTierReply(done=is_done, state=health.state.value, reason=health.reason)


async def _changed(
    tier_admin: TierAdminCalls, name: TierName, request: pb.ChangeTierRequest, wait_s: float
) -> bool:
    match request.verb:
        case pb.TIER_VERB_DRAIN:
            return await tier_admin.drain(name, wait_s)
        case pb.TIER_VERB_RESUME:
            return await tier_admin.resume(name)
        case pb.TIER_VERB_DETACH:
            return await tier_admin.detach(name, wait_s, is_now=request.now)
        case pb.TIER_VERB_ATTACH:
            return await tier_admin.attach(name, wait_s)
    raise StartError(name, f"verb {request.verb} is none", "use this version's kvtier")
