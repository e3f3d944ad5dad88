"""The schema and the loader take the same files, as far as a schema can know."""

import json
import random
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic.fields import FieldInfo

from kvtier.config import Config, read_config
from kvtier.config.model import all_settings
from kvtier.config.reference import render_example, schema
from kvtier.config.section import extra_of
from kvtier.config.toml_text import example_of

VALIDATOR = Draft202012Validator(schema())
FIELDS = list(all_settings())

BAD: tuple[Any, ...] = (-1, 1.5, "", "x y", "5 parsecs", "12Gb", True, [], ["a"], {"a": 1}, 2**70)
"""Most of them are wrong for most keys; both sides must think the same of each."""


CONFLICT = re.compile(
    r"is required if|used together|is (more than (half of )?|not a multiple of )[a-z]+\."
)
"""What the loader says of two keys; a schema knows of one only."""


def loaded(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether the loader takes each value of a file."""
    lines = []
    for section, table in tables.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    path.write_text("\n".join(lines))
    read = read_config(path, {}, {})
    return isinstance(read, Config) or all(CONFLICT.search(str(fault)) for fault in read)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(schema())
    assert json.loads(json.dumps(schema())) == schema()


def test_the_example_is_valid_with_every_key_set() -> None:
    text = re.sub(r"^# (?=\w+ = )", "", render_example(), flags=re.MULTILINE)
    VALIDATOR.validate(tomllib.loads(text))


@pytest.mark.parametrize("text", ["[cpu]\ncapacty = 1", "[sdd]", "cpu = 1"])
def test_what_is_unknown_is_refused(text: str) -> None:
    assert not VALIDATOR.is_valid(tomllib.loads(text))


@pytest.mark.parametrize(("key", "section", "name", "field"), FIELDS, ids=[f[0] for f in FIELDS])
def test_both_think_the_same_of_each_key(
    tmp_path: Path, key: str, section: str, name: str, field: Any
) -> None:
    path, short = tmp_path / "kvtier.toml", key.partition(".")[2]
    example = tomllib.loads(f"x = {example_of(name, field)}")["x"]
    for value in (example, *BAD):
        tables = {section: {short: value}}
        assert VALIDATOR.is_valid(tables) == loaded(path, tables), f"{key} = {value!r}"


def test_both_think_the_same_of_whole_files(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    for number in range(60):
        tables: dict[str, dict[str, Any]] = {}
        for key, section, name, field in choose.sample(FIELDS, 12):
            good = tomllib.loads(f"x = {example_of(name, field)}")["x"]
            value = good if choose.random() < 0.95 else choose.choice(BAD)
            tables.setdefault(section, {})[key.partition(".")[2]] = value
        is_valid = VALIDATOR.is_valid(tables)
        assert is_valid == loaded(tmp_path / f"{number}.toml", tables), f"{seed=} {tables}"


@pytest.mark.parametrize(("key", "field"), [(each[0], each[3]) for each in FIELDS])
def test_a_setting_is_explained(key: str, field: FieldInfo) -> None:
    reason = extra_of(field)["reason"]
    for text in (field.description or "", reason):
        assert re.fullmatch(r"[^|\n]{8,}\.", text), f"{key}: {text!r} is not a sentence"
    assert reason not in (field.description or ""), f"{key} gives its reason twice"
