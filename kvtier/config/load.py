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
from kvtier.config.tiers import RemoteConfig
from kvtier.config.toml_text import example_of
from kvtier.config.units import format_duration, format_size, parse_duration, parse_size
from kvtier.errors import ConfigError, StartError
from kvtier.secret import read_secret, secret_lines

__all__ = [
    "Faults",
    "Given",
    "Layer",
    "from_environment",
    "from_file",
    "from_overrides",
    "load_config",
    "read_config",
    "url_in",
    "with_url",
]

_PREFIX = "KVTIER_"

# Kubernetes sets these in every pod beside a Service named kvtier or kvtier-engine: not ours.
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")

_MAX_FILE_BYTES = 1 << 20  # a configuration has some dozen lines; a model given by mistake has not

_SECTION_LINE = re.compile(r"\s*\[\s*(\w+)\s*\]")
_KEY_LINE = re.compile(r"\s*(\w+)\s*=")


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given, and where."""

    value: object
    source: str


Layer = Mapping[str, Mapping[str, Given]]
"""Section to key to value."""

Faults = list[ConfigError]
"""What was found wrong so far; the functions here add to it, and leave out what is wrong."""


def from_file(path: Path, faults: Faults) -> Layer:
    """Return what a TOML file sets."""
    try:
        text = _file_text(path)
        tables = _parsed(path, text)
    except ConfigError as error:
        faults.append(error)
        return {}
    lines = _lines(text)
    layer: dict[str, dict[str, Given]] = {}
    for section, table in tables.items():
        if not _is_known(section, Config.model_fields, section, str(path), faults):
            continue
        if not isinstance(table, dict):
            remedy = f"write [{section}] above its keys"
            faults.append(ConfigError(section, f"is a section, not a value ({path})", remedy))
            continue
        layer[section] = {}
        for key, value in table.items():
            line = lines.get((section, key))
            source = f"{path}:{line}" if line else str(path)
            if _is_known(key, _fields(section), f"{section}.{key}", source, faults):
                layer[section][key] = Given(value, source)
    return layer


def from_environment(environment: Mapping[str, str], faults: Faults) -> Layer:
    """Return what variables named ``KVTIER_SECTION_KEY`` set."""
    layer: dict[str, dict[str, Given]] = {}
    for variable in sorted(environment):
        section, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
        if not variable.startswith(_PREFIX) or _KUBERNETES.fullmatch(key.upper()):
            continue
        if section not in Config.model_fields:
            _suspect(variable, section, key, faults)
            continue
        _take(layer, f"{section}.{key}", Given(environment[variable], variable), faults)
    return layer


def from_overrides(overrides: Mapping[str, str], faults: Faults) -> Layer:
    """Return what options set, by ``section.key``."""
    layer: dict[str, dict[str, Given]] = {}
    for name, value in overrides.items():
        section = name.partition(".")[0]
        if _is_known(section, Config.model_fields, name, "command line", faults):
            _take(layer, name, Given(value, "command line"), faults)
    return layer


def _fields(section: str) -> dict[str, str]:
    """Return the field names of a section by their keys."""
    return {key_of(name): name for name in section_models()[section].model_fields}


def _is_known(word: str, words: Collection[str], field: str, source: str, faults: Faults) -> bool:
    """Tell whether there is such a key or section, and note it where there is not."""
    if word in words:
        return True
    near = difflib.get_close_matches(word, words, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(words))}"
    faults.append(ConfigError(field, f"unknown ({source})", remedy))
    return False


def _suspect(variable: str, section: str, key: str, faults: Faults) -> None:
    """Note a variable that would be one of ours with a section spelled right; others are not."""
    for near in difflib.get_close_matches(section, Config.model_fields, n=1):
        if key in _fields(near):
            meant = f"{_PREFIX}{near}_{key}".upper()
            faults.append(ConfigError(section, f"unknown ({variable})", f"did you mean {meant}?"))


def _take(layer: dict[str, dict[str, Given]], name: str, given: Given, faults: Faults) -> None:
    """Take a value from where there are only strings: numbers and truth are spelled as in TOML."""
    section, _, key = name.partition(".")
    fields = _fields(section)
    if not _is_known(key, fields, name, given.source, faults):
        return
    field = section_models()[section].model_fields[fields[key]]
    value = _typed(str(given.value), kind_of(fields[key], field))
    layer.setdefault(section, {})[key] = Given(value, given.source)


def _typed(text: str, kind: ValueKind) -> object:
    match kind:
        case ValueKind.FLAG:
            return {"true": True, "false": False}.get(text.lower(), text)
        case ValueKind.NUMBERS:
            return [_number(item) for item in _items(text)]
        case ValueKind.TEXTS:
            return [item.strip("\"'") for item in _items(text)]
        case ValueKind.WHOLE | ValueKind.NUMBER | ValueKind.SIZE:
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
    """Return text as a number if it is one; the model refuses anything else."""
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
        raise ConfigError(str(path), "is larger than 1 MiB", "give a TOML file")
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
        # The message says where: "… (at line 3, column 5)".
        problem = " ".join(str(error).split())
        raise ConfigError(str(path), f"is no TOML: {problem}", "correct that line") from error


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Return the lines in which keys stand; none rather than a wrong one."""
    if '"""' in text or "'''" in text:  # what looks like a key may be part of a text
        return {}
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        if head := _SECTION_LINE.match(line):
            section = head[1]
        elif key := _KEY_LINE.match(line):
            found[section, key[1]] = number
    return found


_URL_FILE = "remote.url_file"


def with_url(config: Config) -> Config:
    """Return ``config`` with the URL that ``remote.url_file`` holds; itself without such a file.

    Reads the file each time. Raises ConfigError, which never tells what is in it.
    """
    path = config.remote.url_file
    return config if path is None else config.with_url(url_in(path), str(path))


def url_in(path: Path) -> str:
    """Return the URL in a file; raises ConfigError likewise."""
    try:
        lines = [line for _, line in secret_lines(read_secret(path, _URL_FILE))]
    except StartError as error:
        raise ConfigError(error.field, error.problem, error.remedy) from None
    if len(lines) != 1:
        raise _url_refusal(f"{path} has {len(lines)} lines and not one")
    try:
        RemoteConfig(url=lines[0])
    except ValidationError:  # it would repeat what is there
        raise _url_refusal(f"{path} has no URL of a Redis server") from None
    return lines[0]


def _url_refusal(problem: str) -> ConfigError:
    return ConfigError(_URL_FILE, problem, "write one line there, such as remote.url would be")


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
