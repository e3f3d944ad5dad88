"""Files named on the command line: read with a size limit, or written as a whole."""

import os
import sys
from pathlib import Path

from kvtier.errors import StartError, reason_of

__all__ = ["check_output", "read_bytes", "read_text", "write_output"]

_OUTPUT_REMEDY = "name a file in a directory that you can write"


def read_bytes(option: str, path: Path | str, max_bytes: int) -> bytes:
    """Return the content of a file, or of standard input for ``-``. Raises StartError."""
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read(max_bytes + 1)
        else:
            with open(path, "rb") as file:
                content = file.read(max_bytes + 1)
    except OSError as error:
        problem = f"cannot read {str(path)!r}: {reason_of(error)}"
        raise StartError(option, problem, "name a readable file") from error
    if len(content) > max_bytes:
        limit = f"{max_bytes >> 20} MiB"
        raise StartError(option, f"{path} is larger than {limit}", f"use at most {limit}")
    return content


def read_text(option: str, path: Path | str, max_bytes: int) -> str:
    """Return the text of a UTF-8 file, or of standard input for ``-``. Raises StartError."""
    try:
        return read_bytes(option, path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise StartError(option, f"{path} is not UTF-8 text", "name a text file") from error


def check_output(option: str, path: Path) -> None:
    """Check before slow work that a file can be written. Raises StartError."""
    problem = ""
    if not path.parent.is_dir():
        problem = f"{path.parent} is not a directory"
    elif path.is_dir():
        problem = f"{path} is a directory"
    elif not os.access(path.resolve().parent if _is_replaced(path) else path, os.W_OK):
        problem = f"cannot write {path}"
    if problem:
        raise StartError(option, problem, _OUTPUT_REMEDY)


def write_output(option: str, path: Path, text: str) -> None:
    """Replace a regular file atomically, or write into a device or pipe. Raises StartError."""
    from kvtier.daemon.persistence.whole_file import replace_file  # slow, and seldom needed

    try:
        if _is_replaced(path):
            successor = f".{os.getpid()}"
            replace_file(path.resolve(), text.encode(), mode=0o666, successor=successor)
        else:
            path.write_text(text)
    except OSError as error:
        problem = f"cannot write {path}: {reason_of(error)}"
        raise StartError(option, problem, _OUTPUT_REMEDY) from error


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()
