"""Documents about the configuration, rendered from its models: reference page, example, schema.

The JSON Schema covers keys, kinds, units and the limits of numbers. It cannot express the limits of
sizes and durations that are written with a unit, or rules between keys: ``config check`` does.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvtier.config.model import section_models
from kvtier.config.section import ValueKind, choices_of, extra_of, is_optional, key_of, kind_of
from kvtier.config.toml_text import as_toml, default_of, example_of
from kvtier.config.units import DURATION_UNITS, SIZE_UNITS

__all__ = ["render_example", "render_reference", "schema"]

_REFERENCE_HEAD = """\
# Configuration

<!-- Written by `make docs` from kvtier/config; change it there. -->

One TOML file, given with `--config FILE`. Without one the defaults hold. Later ones win, key by
key: defaults, the file, environment variables `KVTIER_SECTION_KEY` (`KVTIER_CPU_CAPACITY=8GiB`),
options `--set section.key=value`. An unknown key is an error.

Sizes are whole bytes or carry a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB
(powers of 1024). Durations always carry one: ns, us, ms, s, min, h, d. A list is `[1000, 65532]`
in the file, and `1000,65532` in a variable or an option.

A key that is `live` is taken anew by a running daemon on SIGHUP or `kvtier config reload`; the
others need a restart. How to check, show and reload a configuration: [reload.md](reload.md).
"""

_EXAMPLE_HEAD = """\
# Every key of kvtier with its default, or with an example where the default depends on the machine
# or is "none". Copy what you change; docs/operations/configuration.md tells more. Written by
# `make docs` from kvtier/config.
"""


def _kind(name: str, field: FieldInfo) -> str:
    kind, choices = kind_of(name, field), choices_of(field)
    words = [] if kind is ValueKind.CHOICE else [kind.value]
    return " or ".join([*words, *(f"`{choice}`" for choice in choices)])


def render_reference() -> str:
    """Return docs/operations/configuration.md."""
    parts = [_REFERENCE_HEAD]
    for section, model in section_models().items():
        parts.append(f"\n## [{section}]\n\n{model.__doc__}\n")
        parts.append("\n| key | kind | default | reload | meaning, *and why this default* |\n")
        parts.append("|---|---|---|---|---|\n")
        for name, field in model.model_fields.items():
            default = default_of(name, field).strip('"') or "empty"
            extra = extra_of(field)
            columns = (
                f"`{key_of(name)}`",
                _kind(name, field),
                f"`{default}`",
                "live" if extra.get("live") else "restart",
                f"{field.description} *{extra['reason']}*",
            )
            parts.append(f"| {' | '.join(columns)} |\n")
    return "".join(parts)


def render_example() -> str:
    """Return deploy/kvtier.toml.example: every key, commented out, with its default."""
    parts = [_EXAMPLE_HEAD]
    for section, model in section_models().items():
        parts.append(f"\n[{section}]\n")
        for name, field in model.model_fields.items():
            brief = re.split(r"(?<=[.;])\s", field.description or "")[0].rstrip(".;")
            parts.append(f"# {brief}.\n# {key_of(name)} = {example_of(name, field)}\n")
    return "".join(parts)


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
