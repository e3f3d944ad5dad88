"""``kvtier demo``: ask a real model about a document, once per tier, and show what it took."""

from kvtier.cli.demo.command import add_options

__all__ = ["add_options"]
