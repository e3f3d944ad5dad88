"""Where values are given: a file, the environment, options. What is no key of ours is a fault."""

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config.kind import ValueKind, kind_of
from kvtier.config.model import Config, section_models
from kvtier.config.section import key_of
from kvtier.errors import ConfigError

__all__ = ["Faults", "Given", "Layer", "from_environment", "from_file", "from_overrides"]

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
        text = _read(path)
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


def _read(path: Path) -> str:
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
