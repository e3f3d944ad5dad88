"""The ``kvtier`` command; each subcommand is in the module of its name."""

import errno
import sys
from collections.abc import Sequence

from kvtier.cli.signals import block_hangups
from kvtier.errors import KvtierError, StartError

__all__ = ["main"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""Errors of the device behind standard output; commands report those of other files."""

_SERVERS = frozenset({"serve", "engine"})
"""Commands for which SIGHUP means a reload, unless their terminal has closed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns 0, 1 for a failure, or 2 for invalid input or configuration."""
    words = sys.argv[1:] if arguments is None else arguments
    called = [word for word in words if not word.startswith("-")][:1]
    if called and called[0] in _SERVERS:
        block_hangups()  # the imports take a second
    try:
        from kvtier.cli.commands import make_parser  # imported here: Ctrl-C prints no traceback

        options = make_parser(called).parse_args(words)
        code: int = options.run(options)
        if sys.stdout is not None:  # closed before the start
            sys.stdout.flush()
    except StartError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        remedy = "free memory, or raise the limit (ulimit -v, LimitAS=, container memory)"
        detail = f": {error}" if str(error) else ""
        print(f"kvtier: out of memory{detail}; {remedy}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        print(f"kvtier: cannot write to standard output: {error.strerror}", file=sys.stderr)
        return 1
    return code
