"""From a file to a trace: every format that is read, told by its first line.

Rules
-----
* A line that cannot be used stops the reading, with its number, its field and what would do: a
  figure from half a trace is worse than none.
* Only full blocks count. Hashes of partial ones are dropped, and blocks of more tokens than the
  trace's hashes stand for are made of whole groups of them.
* What a format does not tell is not made up. Where text has to become tokens without a tokenizer,
  or nothing is known of reuse, a note says so.
"""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from typing import Any

from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.errors import StartError
from kvtier.sim.replay.line import Line
from kvtier.sim.replay.line_format import FORMATS, LineFormat
from kvtier.sim.replay.tokens import Tokenizer, load_tokenizer
from kvtier.sim.replay.trace import Numbering, Trace, TraceRequest, in_order

__all__ = ["ReadOptions", "read_trace"]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a trace itself does not say."""

    block_tokens: int = 0
    """Tokens of a block; 0: those of one hash, or 64 where a trace has tokens."""
    hash_tokens: int = 0
    """Tokens that one hash stands for; 0: as is usual for the format."""
    tokenizer: Path | None = None
    """A tokenizer.json, for traces of text."""
    requests_max: int = 0
    """So many requests are read; 0: all."""


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Read a trace, plain or compressed with xz. Raises StartError for what cannot be used."""
    options = options or ReadOptions()
    tokenizer = load_tokenizer(options.tokenizer)
    numbering = Numbering()
    requests: list[TraceRequest] = []
    style: LineFormat | None = None
    for line in _lines(path):
        if style is None:
            style = _format_of(line, options, tokenizer)
            if style.is_header(line):
                continue
        requests.append(_served(style.request(line, numbering), line))
        if len(requests) == options.requests_max:
            break
    if style is None or not requests:
        raise StartError(str(path), "has no requests", "give a trace")
    return Trace(
        path.name.removesuffix(".xz"),
        style.block_tokens,
        in_order(requests),
        numbering.keys(),
        style.notes,
    )


def _served(request: TraceRequest, line: Line) -> TraceRequest:
    """Return a request that a node would take. Raises StartError for a longer one."""
    num_blocks = len(request.blocks)
    if num_blocks > CHAIN_BLOCKS_MAX:
        problem = f"has {num_blocks:,} blocks, and a node takes {CHAIN_BLOCKS_MAX:,} at most"
        raise line.refusal("", problem, "give a larger --block-tokens")
    return request


def _format_of(line: Line, options: ReadOptions, tokenizer: Tokenizer) -> LineFormat:
    for each in FORMATS:
        if each.suits(line):
            return each(line, options.block_tokens, options.hash_tokens, tokenizer)
    names = ", ".join(each.name for each in FORMATS)
    raise line.refusal("", "is of no known format", f"known are {names}")


def _lines(path: Path) -> Iterator[Line]:
    try:
        with _opened(path) as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield _line(path, number, text)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(str(path), f"cannot be read: {reason}", "give a readable trace") from error


def _opened(path: Path) -> TextIOBase:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _line(path: Path, number: int, text: str) -> Line:
    if not text.lstrip().startswith("{"):
        return Line(path, number, text.strip(), {})
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(f"{path}:{number}", f"is no JSON: {error}", "mend or remove it") from None
    return Line(path, number, text.strip(), fields)
