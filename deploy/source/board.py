"""What a dashboard is made of, whoever draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Board", "Kind", "Panel", "Query", "Section"]


class Kind(StrEnum):
    """How a panel draws what it asks for."""

    NUMBER = "number"
    """One figure, over the whole time that is looked at."""
    LINES = "lines"
    STACK = "stack"
    """Parts of a whole."""
    STATES = "states"
    """One figure a series, each 0 or 1."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and what each of its series is called; ``{{label}}`` is filled in."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture: what it shows, in which unit, and what to think of it."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    """By Grafana's name: ``s``, ``bytes``, ``Bps``, ``percentunit``, ``short``."""
    kind: Kind = Kind.LINES
    span: int = 8
    """Of 24 columns."""
    max: float | None = None
    below: str = "green"
    """The colour of what is below all thresholds."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """From which value on which colour."""
    alert: str = ""
    """Whose runbook section explains what is wrong here."""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading, in rows of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    name: str
    """Of its file and in its address."""
    title: str
    description: str
    sections: Sequence[Section]
