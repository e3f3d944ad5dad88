"""From defaults, a file, the environment and options to one checked configuration.

Later ones win, key by key: defaults < file < ``KVTIER_SECTION_KEY`` < options. Every refusal is a
``ConfigError`` on one line that names the key, where its value came from, and what would do.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtier.config.document import example_of
from kvtier.config.model import Address, Config, section_models
from kvtier.config.section import Section, key_of
from kvtier.config.units import format_duration, format_size, parse_duration, parse_size
from kvtier.errors import ConfigError

__all__ = ["load_config"]

_PREFIX = "KVTIER_"

# Kubernetes sets these in every pod beside a Service named kvtier or kvtier-engine: not ours.
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")

_MAX_FILE_BYTES = 1 << 20  # a configuration has some dozen lines; a model given by mistake has not


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was given, and where."""

    value: object
    source: str


_Layer = Mapping[str, Mapping[str, _Given]]  # section -> key -> value


def load_config(
    path: Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Return the configuration from ``path``, the environment and ``section.key`` overrides.

    Raises ConfigError for the first value that cannot be used. Looks at no file but ``path``.
    """
    given: dict[str, dict[str, _Given]] = {name: {} for name in Config.model_fields}
    layers: list[_Layer] = [
        _from_file(path) if path else {},
        _from_environment(os.environ if environment is None else environment),
        _from_overrides(overrides),
    ]
    for layer in layers:
        for section, keys in layer.items():
            given[section] |= keys
    sections = {name: _build(name, keys) for name, keys in given.items()}
    sources = {
        f"{section}.{key}": value.source
        for section, keys in given.items()
        for key, value in keys.items()
    }
    return Config.from_sections(sections, sources)


def _fields(section: str) -> dict[str, str]:
    """Return the field names of a section by their keys."""
    return {key_of(name): name for name in section_models()[section].model_fields}


def _known(word: str, words: Collection[str], field: str, source: str) -> None:
    if word in words:
        return
    near = difflib.get_close_matches(word, words, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(words))}"
    raise ConfigError(field, f"unknown ({source})", remedy)


def _from_file(path: Path) -> _Layer:
    layer = {}
    for section, table in _read_toml(path).items():
        _known(section, Config.model_fields, section, str(path))
        if not isinstance(table, dict):
            raise ConfigError(
                section, f"is a section, not a value ({path})", f"write [{section}] above its keys"
            )
        keys = _fields(section)
        for key in table:
            _known(key, keys, f"{section}.{key}", str(path))
        layer[section] = {key: _Given(value, str(path)) for key, value in table.items()}
    return layer


def _read_toml(path: Path) -> dict[str, object]:
    field = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(field, reason, "give the path of a readable TOML file") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(field, "is larger than 1 MiB", "give a TOML file")
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(field, f"is not UTF-8 (at line {line})", "save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        # The message says where: "… (at line 3, column 5)".
        problem = " ".join(str(error).split())
        raise ConfigError(field, f"is no TOML: {problem}", "correct that line") from error


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    layer: dict[str, dict[str, _Given]] = {}
    for variable in sorted(environment):
        section, _, key = variable.removeprefix(_PREFIX).lower().partition("_")
        if not variable.startswith(_PREFIX) or section not in Config.model_fields:
            continue
        if _KUBERNETES.fullmatch(key.upper()):
            continue
        _known(key, _fields(section), f"{section}.{key}", variable)
        layer.setdefault(section, {})[key] = _from_text(
            section, key, environment[variable], variable
        )
    return layer


def _from_overrides(overrides: Mapping[str, str]) -> _Layer:
    layer: dict[str, dict[str, _Given]] = {}
    for name, value in overrides.items():
        section, _, key = name.partition(".")
        _known(section, Config.model_fields, name, "command line")
        _known(key, _fields(section), name, "command line")
        layer.setdefault(section, {})[key] = _from_text(section, key, value, "command line")
    return layer


def _from_text(section: str, key: str, text: str, source: str) -> _Given:
    """Take a value from where there are only strings: numbers and truth are spelled as in TOML."""
    field = section_models()[section].model_fields[_fields(section)[key]]
    if field.annotation is bool:
        return _Given({"true": True, "false": False}.get(text.lower(), text), source)
    if get_origin(field.annotation) is tuple:
        items = text.strip("[] ").split(",") if text.strip("[] ") else []
        return _Given([_number(item.strip()) for item in items], source)
    if _takes_number(field.annotation):
        return _Given(_number(text), source)
    return _Given(text, source)


def _takes_number(annotation: object) -> bool:
    """Tell whether a field is a number, or may be one."""
    return annotation in {int, float} or any(map(_takes_number, get_args(annotation)))


def _number(text: str) -> float | str:
    """Return a number as one; all else is left for the model to refuse."""
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d{0,18}\.\d{1,18}", text) else text


def _build(section: str, given: Mapping[str, _Given]) -> Section:
    model = section_models()[section]
    names = _fields(section)
    values: dict[str, object] = {}
    for key, item in given.items():
        field = model.model_fields[names[key]]
        try:
            values[names[key]] = _read(names[key], field, item.value)
        except ValueError as error:
            raise _refusal(section, names[key], item, str(error)) from None
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        problem = _problem(name, first)
        raise _refusal(section, name, given[key_of(name)], problem) from None


def _refusal(section: str, name: str, given: _Given, problem: str) -> ConfigError:
    field = section_models()[section].model_fields[name]
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("secret"):
        problem = "is not of the right form"  # its value stays out of every message
    key = key_of(name)
    remedy = f"for example {key} = {example_of(name, field)}"
    return ConfigError(f"{section}.{key}", f"{problem} ({given.source})", remedy)


def _read(name: str, field: FieldInfo, value: object) -> object:
    """Turn a value as given into the field's type where it is written another way."""
    kinds = _kinds(field)
    if name.endswith("_bytes"):
        return parse_size(value)
    if name.endswith("_ns"):
        return parse_duration(value)
    if isinstance(value, list) and get_origin(field.annotation) is tuple:
        return tuple(value)
    if not isinstance(value, str):
        return value
    if type(None) in kinds and not value:
        return None
    if Path in kinds:
        return _path(value)
    if Address in kinds:
        return _address(value)
    return value


def _kinds(field: FieldInfo) -> tuple[object, ...]:
    annotation = field.annotation
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError(f"{text!r} is no path")
    # Relative paths are taken from where the command was given, once: both processes see the same.
    return Path(os.path.abspath(Path(text).expanduser()))


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{text!r} is no HOST:PORT")
    return Address(host, int(port))


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
