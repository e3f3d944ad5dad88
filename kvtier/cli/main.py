"""The ``kvtier`` command: one subcommand a job, each in a module of its name."""

import argparse
import errno
import sys
from collections.abc import Sequence

from kvtier import __version__
from kvtier.cli import (
    demo,
    drop,
    engine,
    explain,
    fsck,
    pin,
    plan,
    probe,
    replay,
    serve,
    stat,
    warm,
)
from kvtier.errors import KvtierError, StartError

__all__ = ["main"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What the device says that our output goes to; of other files a command says it itself."""

_COMMANDS = (serve, engine, stat, explain, pin, warm, drop, replay, plan, probe, fsck, demo)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0, 1 for a failure, 2 for something to put right."""
    parser = argparse.ArgumentParser(
        prog="kvtier",
        description="Keeps KV blocks of LLM engines in tiers, and brings them back when it pays.",
    )
    parser.add_argument("--version", action="version", version=f"kvtier {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
    except StartError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        return 2
    except KvtierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
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
