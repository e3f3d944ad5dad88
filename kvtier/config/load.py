"""From defaults, a file, the environment and options to one checked configuration.

Later ones win, key by key: defaults < file < ``KVTIER_SECTION_KEY`` < options. Every refusal is a
``ConfigError`` on one line that names the key, where its value came from, and what would do.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier.config.document import example_of
from kvtier.config.kind import ValueKind, is_optional, kind_of
from kvtier.config.model import Config, section_models
from kvtier.config.section import ListenAddress, Section, extra_of, key_of
from kvtier.config.source import Faults, Given, from_environment, from_file, from_overrides
from kvtier.config.units import format_duration, format_size, parse_duration, parse_size
from kvtier.errors import ConfigError

__all__ = ["load_config", "read_config"]


def load_config(
    path: Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return the configuration from ``path``, the environment and ``section.key`` overrides.

    Raises ConfigError for the first value that cannot be used. Looks at no file but ``path``.
    """
    read = read_config(path, overrides, environment)
    if not isinstance(read, Config):
        raise read[0]
    return read


def read_config(
    path: Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> Config | tuple[ConfigError, ...]:
    """Return the same configuration, or all that is wrong with it."""
    faults: Faults = []
    given: dict[str, dict[str, Given]] = {name: {} for name in Config.model_fields}
    for layer in (
        from_file(path, faults) if path else {},
        from_environment(os.environ if environment is None else environment, faults),
        from_overrides(overrides, faults),
    ):
        for section, keys in layer.items():
            given[section] |= keys
    sources = {
        f"{section}.{key}": each.source
        for section, keys in given.items()
        for key, each in keys.items()
    }
    sections = {name: _build(name, keys, sources, faults) for name, keys in given.items()}
    whole = {name: section for name, section in sections.items() if section is not None}
    if len(whole) == len(sections):
        conflicts = Config.model_construct(None, **whole).conflicts()
        faults += [_located(conflict, sources) for conflict in conflicts]
    return tuple(faults) or Config.from_sections(whole, sources)


def _build(
    section: str, given: Mapping[str, Given], sources: Mapping[str, str], faults: Faults
) -> Section | None:
    """Return a section, or None and note all that is wrong with it."""
    model = section_models()[section]
    names = {key_of(name): name for name in model.model_fields}
    values: dict[str, object] = {}
    found: dict[str, ConfigError] = {}
    for key, each in given.items():
        name = names[key]
        try:
            values[name] = _read(name, model.model_fields[name], each.value)
        except ValueError as error:
            found[name] = _refusal(section, name, each, str(error))
    conflicts: list[ConfigError] = []
    try:
        built = model(**values)
    except ValidationError as error:
        for each_error in error.errors():
            name = str(each_error["loc"][0])
            problem = _problem(name, each_error)
            found.setdefault(name, _refusal(section, name, given[key_of(name)], problem))
    except ConfigError:
        conflicts = list(model.model_construct(None, **values).conflicts())
    # Values that are no good by themselves come first.
    wrong = list(found.values()) or [_located(conflict, sources) for conflict in conflicts]
    faults += wrong
    return None if wrong else built


def _located(conflict: ConfigError, sources: Mapping[str, str]) -> ConfigError:
    """Add where the value of a key came from that does not fit another one's."""
    source = sources.get(conflict.field, "default")
    return ConfigError(conflict.field, f"{conflict.problem} ({source})", conflict.remedy)


def _refusal(section: str, name: str, given: Given, problem: str) -> ConfigError:
    field = section_models()[section].model_fields[name]
    if extra_of(field).get("secret"):
        problem = "is not of the right form"  # its value stays out of every message
    key = key_of(name)
    remedy = f"for example {key} = {example_of(name, field)}"
    return ConfigError(f"{section}.{key}", f"{problem} ({given.source})", remedy)


def _read(name: str, field: FieldInfo, value: object) -> object:
    """Turn a value as given into the field's type where it is written another way."""
    kind = kind_of(name, field)
    if kind is ValueKind.SIZE:
        return parse_size(value)
    if kind is ValueKind.DURATION:
        return parse_duration(value)
    if kind in {ValueKind.NUMBERS, ValueKind.TEXTS} and isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("is no text in UTF-8")
    if is_optional(field) and not value:
        return None
    if kind is ValueKind.PATH:
        return _path(value)
    return _address(value) if kind is ValueKind.ADDRESS else value


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is no path")
    # Relative paths are taken from where the command was given, once: both processes see the same.
    return Path(os.path.abspath(Path(text).expanduser()))


def _address(text: str) -> ListenAddress:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{text!r} is no HOST:PORT")
    return ListenAddress(host, int(port))


def _problem(name: str, error: ErrorDetails) -> str:
    """Say in the user's terms what the model did not like."""
    value = error["input"]
    limits = error.get("ctx", {})
    shown = _shown(name, value)
    match error["type"]:
        case "greater_than_equal":
            return f"{shown} is less than {_shown(name, limits['ge'])}"
        case "less_than_equal":
            return f"{shown} is more than {_shown(name, limits['le'])}"
        case "multiple_of":
            return f"{shown} is no multiple of {_shown(name, limits['multiple_of'])}"
        case "literal_error":
            return f"{shown} is none of {limits['expected']}"
        case "int_type":
            return f"{shown} is no whole number"
        case "tuple_type":
            return f"{shown} is no list"
        case "bool_type":
            return f"{shown} is neither true nor false"
        case _:
            return f"{shown} is not of the right form"


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return format_size(value)
        if name.endswith("_ns"):
            return format_duration(value)
    return repr(value)
