"""``kvtier demo``: ask a real model about a document, once per tier, and show what it took."""

from kvtier.cli.demo.command import add_parser

__all__ = ["add_parser"]
