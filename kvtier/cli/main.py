"""The ``kvtier`` command: one subcommand per job, each in a module of the same name."""

import errno
import sys
from collections.abc import Sequence

from kvtier.cli.signals import block_hangups
from kvtier.errors import KvtierError, StartError

__all__ = ["main"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of the device that standard output goes to; commands report those of other files."""

_SERVERS = frozenset({"serve", "engine"})
"""Commands that only stop on SIGHUP if their terminal has closed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 for a failure, 2 for wrong input or settings."""
    words = sys.argv[1:] if arguments is None else arguments
    called = [word for word in words if not word.startswith("-")][:1]
    if called and called[0] in _SERVERS:
        block_hangups()  # before the imports, which take a second
    try:
        from kvtier.cli.commands import make_parser  # an interrupt is quiet from here on

        options = make_parser(called).parse_args(words)
        code: int = options.run(options)
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
    except StartError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        remedy = "free memory, or raise the limit (ulimit -v, LimitAS=, the container's)"
        detail = f": {error}" if str(error) else ""
        print(f"kvtier: out of memory{detail}; {remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        print(f"kvtier: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return code
