"""Files that a command writes for its user: looked at before slow work, and written as a whole."""

import os
from pathlib import Path

from kvtier.daemon.persistence.whole_file import replace_file
from kvtier.errors import StartError

__all__ = ["check_file", "write_file"]

_REMEDY = "name a file in a directory that you may write"


def check_file(option: str, path: Path) -> None:
    """Check that a file can be written there; raises StartError, which names the option."""
    problem = ""
    if not path.parent.is_dir():
        problem = f"{path.parent} is no directory"
    elif path.is_dir():
        problem = f"{path} is a directory"
    elif not os.access(path.resolve().parent if _is_replaced(path) else path, os.W_OK):
        problem = f"{path} may not be written"
    if problem:
        raise StartError(option, problem, _REMEDY)


def write_file(option: str, path: Path, text: str) -> None:
    """Write a file, all or nothing; what is no regular file is written to. Raises StartError."""
    try:
        if _is_replaced(path):
            successor = f".{os.getpid()}"
            replace_file(path.resolve(), text.encode(), mode=0o666, successor=successor)
        else:
            path.write_text(text)
    except OSError as error:
        raise StartError(option, f"{path}: {error.strerror}", _REMEDY) from error


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()
