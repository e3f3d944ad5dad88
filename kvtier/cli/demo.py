"""`kvtier demo`."""

from typing import Any


def add_parser(commands: Any) -> None:
    commands.add_parser("demo")
