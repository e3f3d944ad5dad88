"""What two versions have to have in common, by the numbers that they tell each other."""

from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor

from kvtier.core.identity import FORMAT_VERSION
from kvtier.core.plan import PlanReason
from kvtier.v1 import engine_pb2, operator_pb2
from kvtier.wire.convert import PROTOCOL

GOLDEN = Path(__file__).parent / "golden"


def surface_of_protocol() -> dict[str, Any]:
    """Return all that an engine of this protocol may say, hear, and has to compute alike."""
    files = (engine_pb2.DESCRIPTOR, operator_pb2.DESCRIPTOR)
    messages: dict[str, dict[str, list[int]]] = {}
    for file in files:
        for message in file.message_types_by_name.values():
            _note(message, messages)
    return {
        "protocol": PROTOCOL,
        "header": FORMAT_VERSION,
        "messages": messages,
        "words": {
            "Tier": sorted(engine_pb2.Tier.keys()),
            "Order": [field.name for field in engine_pb2.Order.DESCRIPTOR.oneofs[0].fields],
            "PlanReason": sorted(PlanReason),
        },
        "calls": sorted(
            method.name
            for service in engine_pb2.DESCRIPTOR.services_by_name.values()
            for method in service.methods
        ),
    }


def _note(message: Descriptor, messages: dict[str, dict[str, list[int]]]) -> None:
    messages[message.full_name] = {
        field.name: [field.number, field.type, int(field.is_repeated)] for field in message.fields
    }
    for nested in message.nested_types:
        _note(nested, messages)
