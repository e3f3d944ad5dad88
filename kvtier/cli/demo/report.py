"""What the demo says: progress on standard error, the result on standard output."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvtier.cli.shown import shown_count, shown_seconds
from kvtier.core.residency import TierName

if TYPE_CHECKING:
    from kvtier.cli.demo.tour import Pass

__all__ = ["DemoProgress", "DemoStep", "as_json", "print_table"]

_PLAIN_WIDTH = 100
"""Of a table that goes into a file, where rich would take 80 columns and break words."""


@dataclass(slots=True)
class DemoStep:
    """A step under way; ``result`` is said beside it when it is done."""

    result: str = ""


class DemoProgress:
    """Says what is being done and what came of it; plain lines where there is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status = self._console.status("")

    def __enter__(self) -> Self:
        self._status.start()  # shows nothing where there is no terminal
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    @contextmanager
    def step(self, what: str) -> Iterator[DemoStep]:
        """Show a step while it is being done, and leave a line when it is."""
        started_s = time.monotonic()
        self._status.update(what)
        step = DemoStep()
        yield step
        result = step.result or f"{time.monotonic() - started_s:.1f} s"
        self._console.print(f"{what:<52}{result}", soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._console.print(text, soft_wrap=True)


def as_json(passes: Sequence["Pass"]) -> str:
    """Return the passes for programs."""
    rows = [
        {
            "name": done.name,
            "ttft_s": round(done.median.ttft_s, 6),
            "prompt_tokens": done.median.prompt_tokens,
            "tier_tokens": done.median.tier_tokens,
            "computed_tokens": done.median.computed_tokens,
            "same_as_cold": done.is_same_as_cold,
        }
        for done in passes
    ]
    return json.dumps({"passes": rows})


def print_table(passes: Sequence["Pass"]) -> None:
    """Print the passes for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    table = Table(
        box=SIMPLE,
        caption=f"Median of {len(passes[0].answers)} questions; before each of them, the tiers "
        "above the one of the row were emptied.",
        caption_justify="left",
    )
    table.add_column("served by")
    for heading in ("TTFT", "speed-up", "prompt", *TierName, "computed", "same answer"):
        table.add_column(heading, justify="right")
    cold_s = passes[0].median.ttft_s
    for done in passes:
        row = done.median
        table.add_row(
            done.name,
            shown_seconds(row.ttft_s),
            f"{cold_s / row.ttft_s:.1f} x",
            shown_count(row.prompt_tokens),
            *(shown_count(row.tier_tokens[tier]) for tier in TierName),
            shown_count(row.computed_tokens),
            "reference" if done is passes[0] else "yes" if done.is_same_as_cold else "NO",
        )
    console.print(table)
