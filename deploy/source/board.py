"""Dashboards, independent of Grafana."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Board", "Kind", "Panel", "Query", "Section"]


class Kind(StrEnum):
    """How a panel shows its queries."""

    NUMBER = "number"
    """One number, over the whole time range."""
    LINES = "lines"
    STACK = "stack"
    """Parts of a whole."""
    STATES = "states"
    """One number per series."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and the name of its series; ``{{label}}`` is substituted."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str
    """Grafana's name of the unit: ``s``, ``bytes``, ``Bps``, ``percentunit``, ``short``."""
    kind: Kind = Kind.LINES
    span: int = 8
    """Width in columns, of 24."""
    max: float | None = None
    below: str = "green"
    """Colour of values below all thresholds."""
    thresholds: tuple[tuple[float, str], ...] = ()
    """Pairs of a value and the colour from that value on."""
    alert: str = ""
    """Alert whose runbook section the panel links to."""


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under one heading, in rows of 24 columns."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    name: str
    """Name of the file and part of the address."""
    title: str
    description: str
    sections: Sequence[Section]
