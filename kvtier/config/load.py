"""Loads the configuration from defaults, a file, environment variables and options.

Later sources override earlier ones, key by key: defaults < file < ``KVTIER_SECTION_KEY`` < options.
Every error is a ``ConfigError`` of one line with the key, the source of its value and an example.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier.config.model import Config, section_models
from kvtier.config.section import (
    ListenAddress,
    Section,
    ValueKind,
    extra_of,
    is_optional,
    key_of,
    kind_of,
)
from kvtier.config.toml_text import as_toml, example_of
from kvtier.config.units import parse_duration, parse_size
from kvtier.errors import ConfigError

__all__ = ["load_config", "read_config"]

_PREFIX = "KVTIER_"

# Kubernetes sets these in every pod next to a Service named kvtier or kvtier-engine.
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")

_MAX_FILE_BYTES = 1 << 20  # a configuration has a few dozen lines; a larger file is a mistake

_SECTION_LINE = re.compile(r"\s*\[\s*(\w+)\s*\]")
_KEY_LINE = re.compile(r"\s*(\w+)\s*=")


@dataclass(frozen=True, slots=True)
class _Given:
    """A value before it is checked."""

    value: object
    source: str


_Layer = Mapping[str, Mapping[str, _Given]]
"""The values of one source, by section and key."""

_Errors = list[ConfigError]


def load_config(
    path: Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return the configuration from ``path``, the environment and ``section.key`` overrides.

    Reads no other file. Raises ConfigError for the first invalid value.
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
    """Return the same configuration, or all errors in it."""
    errors: _Errors = []
    given: dict[str, dict[str, _Given]] = {name: {} for name in section_models()}
    for layer in (
        _from_file(path, errors) if path else {},
        _from_environment(os.environ if environment is None else environment, errors),
        _from_overrides(overrides, errors),
    ):
        for section, keys in layer.items():
            given[section] |= keys
    sources = {
        f"{section}.{key}": each.source
        for section, keys in given.items()
        for key, each in keys.items()
    }
    sections = {name: _build(name, keys, sources, errors) for name, keys in given.items()}
    whole = {name: section for name, section in sections.items() if section is not None}
    if len(whole) == len(sections):
        conflicts = Config.model_construct(None, **Config.fields_of(whole)).conflicts()
        errors += [_located(conflict, sources) for conflict in conflicts]
    return tuple(errors) or Config.from_sections(whole, sources)


def _from_file(path: Path, errors: _Errors) -> _Layer:
    """Return the values in a TOML file."""
    try:
        text = _file_text(path)
        tables = _parsed(path, text)
    except ConfigError as error:
        errors.append(error)
        return {}
    lines = _line_numbers(text)
    layer: dict[str, dict[str, _Given]] = {}
    for section, table in tables.items():
        if not _is_known(section, section_models(), section, str(path), errors):
            continue
        if not isinstance(table, dict):
            remedy = f"write [{section}] on a line above its keys"
            errors.append(ConfigError(section, f"is a section, not a key ({path})", remedy))
            continue
        layer[section] = {}
        for key, value in table.items():
            line = lines.get((section, key))
            source = f"{path}:{line}" if line else str(path)
            if _is_known(key, _fields(section), f"{section}.{key}", source, errors):
                layer[section][key] = _Given(value, source)
    return layer


def _from_environment(environment: Mapping[str, str], errors: _Errors) -> _Layer:
    """Return the values of variables named ``KVTIER_SECTION_KEY``."""
    layer: dict[str, dict[str, _Given]] = {}
    for variable in sorted(environment):
        section, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
        if not variable.startswith(_PREFIX) or _KUBERNETES.fullmatch(key.upper()):
            continue
        if section not in section_models():
            _check_misspelling(variable, section, key, errors)
            continue
        _take(layer, f"{section}.{key}", _Given(environment[variable], variable), errors)
    return layer


def _from_overrides(overrides: Mapping[str, str], errors: _Errors) -> _Layer:
    """Return the values of options, by ``section.key``."""
    layer: dict[str, dict[str, _Given]] = {}
    for name, value in overrides.items():
        section = name.partition(".")[0]
        if _is_known(section, section_models(), name, "command line", errors):
            _take(layer, name, _Given(value, "command line"), errors)
    return layer


def _fields(section: str) -> dict[str, str]:
    """Return the field names of a section by their keys."""
    return {key_of(name): name for name in section_models()[section].model_fields}


def _is_known(word: str, words: Collection[str], field: str, source: str, errors: _Errors) -> bool:
    """Return whether a key or section exists; adds an error if not."""
    if word in words:
        return True
    noun = "sections" if words is section_models() else "keys"
    near = difflib.get_close_matches(word, words, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"valid {noun} are {', '.join(sorted(words))}"
    errors.append(ConfigError(field, f"unknown {noun.removesuffix('s')} ({source})", remedy))
    return False


def _check_misspelling(variable: str, section: str, key: str, errors: _Errors) -> None:
    """Add an error if a variable has a misspelled section name; ignore all others."""
    for near in difflib.get_close_matches(section, section_models(), n=1):
        if key in _fields(near):
            meant = f"{_PREFIX}{near}_{key}".upper()
            problem = f"unknown section ({variable})"
            errors.append(ConfigError(section, problem, f"did you mean {meant}?"))


def _take(layer: dict[str, dict[str, _Given]], name: str, given: _Given, errors: _Errors) -> None:
    """Add a value from a source that has only strings, converted to its type."""
    section, _, key = name.partition(".")
    fields = _fields(section)
    if not _is_known(key, fields, name, given.source, errors):
        return
    field = section_models()[section].model_fields[fields[key]]
    value = _typed(str(given.value), kind_of(fields[key], field))
    layer.setdefault(section, {})[key] = _Given(value, given.source)


def _typed(text: str, kind: ValueKind) -> object:
    match kind:
        case ValueKind.FLAG:
            return {"true": True, "false": False}.get(text.lower(), text)
        case ValueKind.INTEGERS:
            return [_number(item) for item in _items(text)]
        case ValueKind.STRINGS:
            return [item.strip("\"'") for item in _items(text)]
        case ValueKind.INTEGER | ValueKind.NUMBER | ValueKind.SIZE:
            return _number(text)
        case _:
            return text


def _items(text: str) -> list[str]:
    """Split a list that is written with or without brackets."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1].strip()
    return [item.strip() for item in text.split(",")] if text else []


def _number(text: str) -> float | str:
    """Return a number if the text is one; the model refuses any other text."""
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d{0,18}\.\d{1,18}", text) else text


def _file_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), reason, "give the path of a readable TOML file") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(str(path), "is larger than 1 MiB", "give the path of a TOML file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        problem = f"is not UTF-8 (at line {line})"
        raise ConfigError(str(path), problem, "save it as UTF-8") from error


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        # The message contains the place: "… (at line 3, column 5)".
        problem = " ".join(str(error).split())
        raise ConfigError(str(path), f"is not valid TOML: {problem}", "fix that line") from error


def _line_numbers(text: str) -> dict[tuple[str, str], int]:
    """Return the line number of each key, or nothing if the numbers could be wrong."""
    if '"""' in text or "'''" in text:  # a multi-line string may contain text that looks like a key
        return {}
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if head := _SECTION_LINE.match(line):
            section = head[1]
        elif key := _KEY_LINE.match(line):
            found[section, key[1]] = number
    return found


def _build(
    section: str, given: Mapping[str, _Given], sources: Mapping[str, str], errors: _Errors
) -> Section | None:
    """Return a section, or None after adding all errors in it."""
    model = section_models()[section]
    names = {key_of(name): name for name in model.model_fields}
    values: dict[str, object] = {}
    found: dict[str, ConfigError] = {}
    for key, each in given.items():
        name = names[key]
        try:
            values[name] = _parse(name, model.model_fields[name], each.value)
        except ValueError as error:
            found[name] = _error(section, name, each, str(error))
    conflicts: list[ConfigError] = []
    try:
        built = model(**values)
    except ValidationError as error:
        for each_error in error.errors():
            name = str(each_error["loc"][0])
            problem = _problem(name, model.model_fields[name], each_error)
            found.setdefault(name, _error(section, name, given[key_of(name)], problem))
    except ConfigError:
        conflicts = list(model.model_construct(None, **values).conflicts())
    # Values that are invalid by themselves come first.
    wrong = list(found.values()) or [_located(conflict, sources) for conflict in conflicts]
    errors += wrong
    return None if wrong else built


def _located(conflict: ConfigError, sources: Mapping[str, str]) -> ConfigError:
    """Add the source of a key's value to its error."""
    source = sources.get(conflict.field, "default")
    return ConfigError(conflict.field, f"{conflict.problem} ({source})", conflict.remedy)


def _error(section: str, name: str, given: _Given, problem: str) -> ConfigError:
    field = section_models()[section].model_fields[name]
    if extra_of(field).get("secret"):
        problem = "has an invalid value"  # never shows the value
    key = key_of(name)
    remedy = f"for example {key} = {example_of(name, field)}"
    return ConfigError(f"{section}.{key}", f"{problem} ({given.source})", remedy)


def _parse(name: str, field: FieldInfo, value: object) -> object:
    """Convert a value to the field's type if the file writes it differently."""
    kind = kind_of(name, field)
    if kind is ValueKind.SIZE:
        return parse_size(value)
    if kind is ValueKind.DURATION:
        return parse_duration(value)
    if kind in {ValueKind.INTEGERS, ValueKind.STRINGS} and isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        return value
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError("is not valid UTF-8")
    if is_optional(field) and not value:
        return None
    if kind is ValueKind.PATH:
        return _path(value)
    return _address(value) if kind is ValueKind.ADDRESS else value


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is not a path")
    # Relative paths refer to the command's directory, so that all processes see the same path.
    return Path(os.path.abspath(Path(text).expanduser()))


def _address(text: str) -> ListenAddress:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{text!r} is not a HOST:PORT address")
    return ListenAddress(host, int(port))


def _problem(name: str, field: FieldInfo, error: ErrorDetails) -> str:
    """Describe in the user's terms why the model refused a value."""
    limits = error.get("ctx", {})
    shown = _shown(name, error["input"])
    match error["type"]:
        case "greater_than_equal":
            return f"{shown} is below the minimum of {_shown(name, limits['ge'])}"
        case "less_than_equal":
            return f"{shown} is above the maximum of {_shown(name, limits['le'])}"
        case "multiple_of":
            return f"{shown} is not a multiple of {_shown(name, limits['multiple_of'])}"
        case "string_too_short":
            return "must not be empty"
        case "string_too_long":
            return f"has more than {limits['max_length']} characters"
        case "literal_error":
            kind = kind_of(name, field)
            if kind is not ValueKind.CHOICE:
                return f"expected a valid {kind.value} or {limits['expected']}, got {shown}"
            return f"{shown} is not one of {limits['expected']}"
        case "string_pattern_mismatch":
            return f"{shown} is not a valid value"
        case _ if len(error["loc"]) > 1 and kind_of(name, field) in _ITEMS:
            return f"expected a list of {_ITEMS[kind_of(name, field)]}s, got the item {shown}"
        case _:
            kind = kind_of(name, field)
            return f"expected {_EXPECTED.get(kind, f'a {kind}')}, got {shown}"


_ITEMS: Mapping[ValueKind, str] = {ValueKind.INTEGERS: "integer", ValueKind.STRINGS: "string"}

_EXPECTED: Mapping[ValueKind, str] = {
    ValueKind.FLAG: "true or false",
    ValueKind.CHOICE: "a string",
    ValueKind.INTEGER: "an integer",
    ValueKind.ADDRESS: "a HOST:PORT address",
}


def _shown(name: str, value: object) -> str:
    """Return a value for a message, as the file would write it."""
    if isinstance(value, bool | int | float):
        return as_toml(name, value).strip('"')
    return repr(value)
