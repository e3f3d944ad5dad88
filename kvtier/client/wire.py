"""Between the words of the node and those of the wire."""

from collections.abc import Mapping

from kvtier.core.residency import TierName
from kvtier.v1 import engine_pb2 as pb

__all__ = ["PROTOCOL", "tier_from_wire", "tier_to_wire"]

PROTOCOL = 1
"""Version of what the messages mean; client and daemon must agree."""

_TO_WIRE: Mapping[TierName, "pb.Tier.ValueType"] = {
    TierName.GPU: pb.TIER_GPU,
    TierName.CPU: pb.TIER_CPU,
    TierName.SSD: pb.TIER_SSD,
    TierName.REMOTE: pb.TIER_REMOTE,
}
_FROM_WIRE: Mapping["pb.Tier.ValueType", TierName] = {
    number: name for name, number in _TO_WIRE.items()
}


def tier_to_wire(tier: TierName) -> "pb.Tier.ValueType":
    """Return the wire's number for a tier."""
    return _TO_WIRE[tier]


def tier_from_wire(number: "pb.Tier.ValueType") -> TierName:
    """Return the tier for a number; raises KeyError for one that is none."""
    return _FROM_WIRE[number]
