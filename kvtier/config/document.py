"""The configuration's own documents, written from its models so that they cannot disagree."""

import re
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from kvtier.config.model import section_models
from kvtier.config.section import key_of
from kvtier.config.units import format_duration, format_size

__all__ = ["default_of", "example_of", "render_example", "render_reference"]

_REFERENCE_HEAD = """\
# Configuration

<!-- Written by `make docs` from kvtier/config; change it there. -->

One TOML file, given with `--config FILE`. Without one the defaults hold. Later ones win, key by
key: defaults, the file, environment variables `KVTIER_SECTION_KEY` (`KVTIER_CPU_CAPACITY=8GiB`),
options `--set section.key=value`. An unknown key is an error, and so is a value without its unit.

Sizes are whole bytes or carry a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB
(powers of 1024). Durations always carry one: ns, us, ms, s, min, h, d. A list is `[1000, 65532]`
in the file, and `1000,65532` in a variable or an option.
"""

_EXAMPLE_HEAD = """\
# Every key of kvtier with its default, or with an example where the default depends on the machine
# or is "none". Copy what you change; docs/operations/configuration.md tells more. Written by
# `make docs` from kvtier/config.
"""


def _as_toml(name: str, value: object) -> str:
    """Write a field's value as it stands in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        if name.endswith("_bytes"):
            return f'"{format_size(value)}"'
        return f'"{format_duration(value)}"' if name.endswith("_ns") else str(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, tuple):
        return str(list(value))
    return '""' if value is None else f'"{value}"'


def _extra(field: FieldInfo) -> dict[str, object]:
    extra = field.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def default_of(name: str, field: FieldInfo) -> str:
    """Return the default of a field for people: in TOML, or in words where it has no fixed one."""
    shown = _extra(field).get("shown_default")
    return str(shown) if shown else _as_toml(name, field.default)


def example_of(name: str, field: FieldInfo) -> str:
    """Return a value that the field would take, in TOML."""
    if example := _extra(field).get("example"):
        return str(example) if _is_list(field) else f'"{example}"'
    return _as_toml(name, field.default)


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _kind(name: str, field: FieldInfo) -> str:
    if name.endswith("_bytes"):
        return "size"
    if name.endswith("_ns"):
        return "duration"
    annotation = field.annotation
    parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if _is_list(field):
        return "list of numbers"
    if Path in parts:
        return "path"
    if bool in parts:
        return "true or false"
    if {int, float} & set(parts):
        return "number"
    choices = [choice for choice in get_args(annotation) if isinstance(choice, str)]
    return " or ".join(f"`{choice}`" for choice in choices) or "text"


def render_reference() -> str:
    """Return docs/operations/configuration.md."""
    parts = [_REFERENCE_HEAD]
    for section, model in section_models().items():
        parts.append(f"\n## [{section}]\n\n{model.__doc__}\n")
        parts.append("\n| key | kind | default | meaning |\n|---|---|---|---|\n")
        for name, field in model.model_fields.items():
            default = default_of(name, field).strip('"') or "empty"
            parts.append(
                f"| `{key_of(name)}` | {_kind(name, field)} | `{default}` | {field.description} |\n"
            )
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
