"""The configuration file as a JSON Schema, written from the models: for editors and for CI.

It knows keys, kinds, units and the limits of numbers. It cannot know the limits of sizes and
durations that are written with a unit, nor what two keys must have in common: ``config check``
does.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvtier.config.document import as_toml
from kvtier.config.kind import ValueKind, choices_of, is_optional, kind_of
from kvtier.config.model import section_models
from kvtier.config.section import extra_of, key_of
from kvtier.config.units import DURATION_UNITS, SIZE_UNITS

__all__ = ["schema"]

_Schema = dict[str, Any]

_LIMITS: Mapping[str, str] = {
    "ge": "minimum",
    "le": "maximum",
    "multiple_of": "multipleOf",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}
"""What stands in a field's metadata, and what JSON Schema calls it."""


def schema() -> _Schema:
    """Return the schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvtier.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            section: {
                "description": model.__doc__,
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    key_of(name): _property(name, field)
                    for name, field in model.model_fields.items()
                },
            }
            for section, model in section_models().items()
        },
    }


def _property(name: str, field: FieldInfo) -> _Schema:
    extra = extra_of(field)
    kinds = [_value(kind_of(name, field), field)]
    if choices_of(field) and kind_of(name, field) is not ValueKind.CHOICE:
        kinds.append({"enum": list(choices_of(field))})
    if (
        is_optional(field) and kind_of(name, field) is not ValueKind.PATH
    ):  # a path may be empty as it is
        kinds.append({"const": ""})
    found: _Schema = {"description": f"{field.description} {extra['reason']}"}
    if field.default is not PydanticUndefined:
        found["default"] = json.loads(as_toml(name, field.default))
    return found | (kinds[0] if len(kinds) == 1 else {"anyOf": kinds})


def _value(kind: ValueKind, field: FieldInfo) -> _Schema:
    match kind:
        case ValueKind.SIZE:
            text = {"type": "string", "pattern": _quantity(SIZE_UNITS, "?")}
            return {"anyOf": [{"type": "integer"} | _limits(field), text]}
        case ValueKind.DURATION:
            return {"type": "string", "pattern": _quantity(DURATION_UNITS, "")}
        case ValueKind.FLAG:
            return {"type": "boolean"}
        case ValueKind.WHOLE:
            return {"type": "integer"} | _limits(field)
        case ValueKind.NUMBER:
            return {"type": "number"} | _limits(field)
        case ValueKind.NUMBERS:
            return {"type": "array", "items": {"type": "integer"} | _limits(field)}
        case ValueKind.TEXTS:
            return {"type": "array", "items": {"type": "string"} | _limits(field)}
        case ValueKind.CHOICE:
            return {"enum": list(choices_of(field))}
        case ValueKind.ADDRESS:
            return {"type": "string", "pattern": r"^.+:\d{1,5}$"}
        case ValueKind.PATH if not is_optional(field):
            return {"type": "string", "minLength": 1}
        case _:
            return {"type": "string"} | _limits(field)


def _limits(field: FieldInfo) -> _Schema:
    """Return the limits that a field's values have."""
    return {
        said: value
        for each in (*field.metadata, *_inner(field.annotation))
        for name, said in _LIMITS.items()
        if (value := getattr(each, name, None)) is not None
    }


def _inner(annotation: object) -> Iterator[object]:
    """Yield what is said of a part of an annotation: of a list's items, of a union's number."""
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            yield from (each for said in get_args(part)[1:] for each in said.metadata)


def _quantity(units: Mapping[str, int], unit_is: str) -> str:
    """Return what a number with a unit looks like."""
    return rf"^\s*\d{{1,18}}(\.\d{{1,9}})?\s*({'|'.join(units)}){unit_is}\s*$"
