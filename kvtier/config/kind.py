"""What kind of value a field takes: how it is read, written, described and put into a schema."""

from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kvtier.config.section import ListenAddress

__all__ = ["ValueKind", "choices_of", "is_optional", "kind_of"]


class ValueKind(StrEnum):
    """Each is what the documents call it."""

    SIZE = "size"
    DURATION = "duration"
    FLAG = "true or false"
    WHOLE = "whole number"
    NUMBER = "number"
    NUMBERS = "list of numbers"
    TEXTS = "list of texts"
    CHOICE = "one of"
    PATH = "path"
    ADDRESS = "host:port"
    TEXT = "text"


_BY_TYPE = (
    (bool, ValueKind.FLAG),
    (int, ValueKind.WHOLE),
    (float, ValueKind.NUMBER),
    (tuple[int], ValueKind.NUMBERS),
    (tuple[str], ValueKind.TEXTS),
    (Path, ValueKind.PATH),
    (ListenAddress, ValueKind.ADDRESS),
    (str, ValueKind.TEXT),
)


def kind_of(name: str, field: FieldInfo) -> ValueKind:
    """Return the kind of the field called ``name``."""
    if name.endswith("_bytes"):
        return ValueKind.SIZE
    if name.endswith("_ns"):
        return ValueKind.DURATION
    types = set(map(_class, _members(field.annotation)))
    return next((kind for each, kind in _BY_TYPE if each in types), ValueKind.CHOICE)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field takes, where it does not take any."""
    literals = [each for each in _members(field.annotation) if get_origin(each) is Literal]
    return tuple(str(word) for each in literals for word in get_args(each))


def is_optional(field: FieldInfo) -> bool:
    """Tell whether a field may have no value, which is written as an empty text."""
    return type(None) in _members(field.annotation)


def _members(annotation: object) -> tuple[object, ...]:
    """Return the parts of a union, or else the annotation itself."""
    is_union = get_origin(annotation) in {Union, UnionType}
    return get_args(annotation) if is_union else (annotation,)


def _class(annotation: object) -> object:
    """Return an annotation's type without its metadata; for a tuple, also the type of its items."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return arguments[0]
    if origin is tuple:
        return tuple[_class(arguments[0])]  # type: ignore[misc]  # a value here, not an annotation
    return origin or annotation
