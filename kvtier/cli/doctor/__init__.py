"""``kvtier doctor``: looks at the machine, and says what to change."""

from kvtier.cli.doctor.command import add_options

__all__ = ["add_options"]
