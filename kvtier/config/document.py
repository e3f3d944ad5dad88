"""The configuration's own documents, written from its models so that they cannot disagree."""

import json
import re

from pydantic.fields import FieldInfo

from kvtier.config.kind import ValueKind, choices_of, kind_of
from kvtier.config.model import section_models
from kvtier.config.section import extra_of, key_of
from kvtier.config.units import format_duration, format_size

__all__ = ["as_toml", "default_of", "example_of", "render_example", "render_reference", "toml_of"]

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


def as_toml(name: str, value: object) -> str:
    """Return a field's value as it stands in the file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        if name.endswith("_bytes"):
            return f'"{format_size(value)}"'
        return f'"{format_duration(value)}"' if name.endswith("_ns") else str(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, tuple):
        return toml_of(list(value))
    return toml_of("" if value is None else str(value))


def toml_of(value: object) -> str:
    """Return a text, a number, a truth or a list of them in TOML."""
    # As in JSON, but for this letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def default_of(name: str, field: FieldInfo) -> str:
    """Return the default of a field for people: in TOML, or in words where it has no fixed one."""
    return extra_of(field)["shown_default"] or as_toml(name, field.default)


def example_of(name: str, field: FieldInfo) -> str:
    """Return a value that the field would take, in TOML."""
    if example := extra_of(field).get("example"):
        is_list = kind_of(name, field) in {ValueKind.NUMBERS, ValueKind.TEXTS}
        return str(example) if is_list else f'"{example}"'
    return as_toml(name, field.default)


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
