"""Reads a trace file in any supported format, recognized by its first line.

Rules
-----
* A line that cannot be used stops reading, with its number, the field and a remedy: results of half
  a trace are worse than none.
* Only full blocks count. Hashes of partial blocks are dropped. Blocks that are larger than the
  trace's hashes consist of whole groups of them.
* Nothing is invented. If text is split without a tokenizer, or reuse is unknown, a note says so.
"""

import csv
import json
import lzma
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOBase
from pathlib import Path
from typing import Any, ClassVar, Protocol

from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks, tenant_digest
from kvtier.core.limits import CHAIN_BLOCKS_MAX
from kvtier.errors import StartError
from kvtier.sim.replay.trace import Numbering, Trace, TraceRequest, in_order
from kvtier.sim.replay.trace_line import (
    PSEUDO_NOTE,
    YEARS_S,
    Tokenizer,
    TraceLine,
    load_tokenizer,
    pseudo_tokens,
)

__all__ = [
    "FORMATS",
    "AzureFormat",
    "BailianFormat",
    "KvtierFormat",
    "MooncakeFormat",
    "ReadOptions",
    "TextFormat",
    "TraceFormat",
    "read_trace",
]


_MS, _SECOND_NS, _US = 10**6, 10**9, 10**3
_BLOCK_TOKENS = 64
"""Default block size of traces with tokens, that of an engine."""
_SPACE = bytes(16)
_DIGITS_MAX = 18


class TraceFormat(Protocol):
    """Reads the lines of one format. Created for the first line, which ``suits`` it."""

    name: ClassVar[str]
    has_header: ClassVar[bool]
    """The first line contains no request."""
    notes: tuple[str, ...]
    block_tokens: int

    def __init__(
        self, line: TraceLine, block_tokens: int, hash_tokens: int, tokenizer: Tokenizer
    ) -> None: ...

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Return whether a first line is of this format."""

    def request(self, line: TraceLine, numbering: Numbering) -> TraceRequest:
        """Return the request of a line. Raises StartError if it cannot be used."""


class _Hashes:
    """Hashes as block contents, several per block if blocks are larger than hashes."""

    def __init__(self, line: TraceLine, block_tokens: int, hash_tokens: int) -> None:
        self.block_tokens = block_tokens or hash_tokens
        self.hash_tokens = hash_tokens
        if self.block_tokens % hash_tokens:
            raise StartError(
                "--block-tokens",
                f"{block_tokens} is not a multiple of the {hash_tokens} tokens of a hash "
                f"in {line.path}",
                f"give a multiple of {hash_tokens}",
            )

    def contents(self, line: TraceLine, num_tokens: int) -> Iterable[Hashable]:
        """Return the content of each full block."""
        ids = line.ids("hash_ids")
        num_full = num_tokens // self.hash_tokens
        if len(ids) < num_full:
            raise line.error(
                "hash_ids",
                f"{len(ids)} ids for {num_tokens} tokens in hashes of {self.hash_tokens}",
                "see --hash-tokens",
            )
        size = self.block_tokens // self.hash_tokens
        if size == 1:
            return ids[:num_full]
        num_blocks = num_full // size
        return (tuple(ids[i * size : (i + 1) * size]) for i in range(num_blocks))


class _Tokens:
    """Tokens as block contents."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens or _BLOCK_TOKENS

    def contents(self, tokens: Sequence[int]) -> Iterable[Hashable]:
        """Return the content of each full block: its hash, which is short."""
        return hash_blocks(chain_root(_SPACE, NO_TENANT), tokens, self.block_tokens)


class MooncakeFormat:
    """``timestamp`` in ms, ``input_length``, ``output_length``, ``hash_ids`` of 512 tokens."""

    name: ClassVar[str] = "Mooncake JSONL"
    has_header: ClassVar[bool] = False
    hash_tokens: ClassVar[int] = 512
    unit_ns: ClassVar[int] = _MS

    def __init__(
        self, line: TraceLine, block_tokens: int, hash_tokens: int, _tokenizer: Tokenizer
    ) -> None:
        self._hashes = _Hashes(line, block_tokens, hash_tokens or self.hash_tokens)
        self.block_tokens = self._hashes.block_tokens
        self.notes: tuple[str, ...] = ()

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Recognize the hashes and the time."""
        return {"hash_ids", "timestamp", "input_length"} <= line.fields.keys()

    def request(self, line: TraceLine, numbering: Numbering) -> TraceRequest:
        """Return the request of a line."""
        num_tokens = line.count("input_length")
        return TraceRequest(
            at_ns=line.time_ns("timestamp", self.unit_ns),
            blocks=numbering.number(NO_TENANT, self._hashes.contents(line, num_tokens)),
            num_tokens=num_tokens,
            num_output_tokens=line.count("output_length", 0),
            kind=line.text_of("type", "")[:64],
        )


class BailianFormat(MooncakeFormat):
    """Like Mooncake, with ``chat_id``, ``timestamp`` in seconds, and ``hash_ids`` of 16 tokens."""

    name: ClassVar[str] = "Bailian JSONL"
    hash_tokens: ClassVar[int] = 16
    unit_ns: ClassVar[int] = _SECOND_NS

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Recognize the chat ids, which Mooncake's traces lack."""
        return MooncakeFormat.suits(line) and "chat_id" in line.fields


class TextFormat:
    """``timestamp`` in us, ``input`` and ``output`` as text."""

    name: ClassVar[str] = "text JSONL"
    has_header: ClassVar[bool] = False

    def __init__(
        self, line: TraceLine, block_tokens: int, _hash_tokens: int, tokenizer: Tokenizer
    ) -> None:
        self._tokens = _Tokens(block_tokens)
        self._tokenize = tokenizer
        self.block_tokens = self._tokens.block_tokens
        self.notes: tuple[str, ...] = (PSEUDO_NOTE,) if tokenizer is pseudo_tokens else ()

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Recognize the text."""
        return {"timestamp", "input"} <= line.fields.keys()

    def request(self, line: TraceLine, numbering: Numbering) -> TraceRequest:
        """Return the request of a line."""
        tokens = self._tokenize(line.text_of("input"))
        return TraceRequest(
            at_ns=line.time_ns("timestamp", _US),
            blocks=numbering.number(NO_TENANT, self._tokens.contents(tokens)),
            num_tokens=len(tokens),
            num_output_tokens=len(self._tokenize(line.text_of("output", ""))),
            kind=line.text_of("agent", "")[:64],
        )


class KvtierFormat:
    """kvtier's: ``timestamp_s``, ``tokens`` or ``hash_ids`` with ``input_length``, and hints."""

    name: ClassVar[str] = "kvtier JSONL"
    has_header: ClassVar[bool] = False

    def __init__(
        self, line: TraceLine, block_tokens: int, hash_tokens: int, _tokenizer: Tokenizer
    ) -> None:
        self._has_tokens = "tokens" in line.fields
        if not self._has_tokens and not hash_tokens:
            hash_tokens = line.count("hash_tokens", _BLOCK_TOKENS) or _BLOCK_TOKENS
        self._tokens = _Tokens(block_tokens)
        self._hashes = _Hashes(line, block_tokens, max(1, hash_tokens))
        source = self._tokens if self._has_tokens else self._hashes
        self.block_tokens = source.block_tokens
        self.notes: tuple[str, ...] = ()

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Recognize the name of the time field."""
        return "timestamp_s" in line.fields and bool({"tokens", "hash_ids"} & line.fields.keys())

    def request(self, line: TraceLine, numbering: Numbering) -> TraceRequest:
        """Return the request of a line."""
        tenant = tenant_digest(line.text_of("tenant", ""))
        contents: Iterable[Hashable]
        if self._has_tokens:
            tokens = line.tokens("tokens")
            num_tokens, contents = len(tokens), self._tokens.contents(tokens)
        else:
            num_tokens = line.count("input_length")
            contents = self._hashes.contents(line, num_tokens)
        return TraceRequest(
            at_ns=line.time_ns("timestamp_s", _SECOND_NS),
            blocks=numbering.number(tenant, contents),
            num_tokens=num_tokens,
            num_output_tokens=line.count("output_length", 0),
            tenant=tenant,
            kind=line.text_of("kind", "")[:64],
            continues=line.number_of("continues", 0.0, 1.0),
            gap_s=line.number_of("gap_s", 0.0, 1e9),
        )


class AzureFormat:
    """``TIMESTAMP,ContextTokens,GeneratedTokens``: token counts only, so nothing is reused."""

    name: ClassVar[str] = "Azure CSV"
    has_header: ClassVar[bool] = True
    columns: ClassVar[Sequence[str]] = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def __init__(
        self, line: TraceLine, block_tokens: int, _hash_tokens: int, _tokenizer: Tokenizer
    ) -> None:
        self.block_tokens = block_tokens or _BLOCK_TOKENS
        self.notes: tuple[str, ...] = (
            "this format has prompt lengths but no contents, so there are no hits",
        )

    @staticmethod
    def suits(line: TraceLine) -> bool:
        """Recognize the names of the columns."""
        return line.text == ",".join(AzureFormat.columns)

    def request(self, line: TraceLine, numbering: Numbering) -> TraceRequest:
        """Return the request of a line; its blocks occur nowhere else."""
        try:
            values = next(csv.reader([line.text]))
        except csv.Error as error:
            raise line.error("", f"is not valid CSV: {error}", "fix or remove it") from None
        if len(values) != len(self.columns):
            raise line.error("", f"has {len(values)} columns", f"give {','.join(self.columns)}")
        counts = TraceLine(line.path, line.number, line.text, _numbers(values))
        num_tokens = counts.count("ContextTokens")
        contents = [(line.number, place) for place in range(num_tokens // self.block_tokens)]
        return TraceRequest(
            at_ns=_instant_ns(line, values[0]),
            blocks=numbering.number(NO_TENANT, contents),
            num_tokens=num_tokens,
            num_output_tokens=counts.count("GeneratedTokens"),
        )


def _numbers(values: Sequence[str]) -> dict[str, int | str]:
    named = zip(AzureFormat.columns, values, strict=True)
    # More digits are not a count, and exceed what Python parses.
    return {
        name: int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else text
        for name, text in named
    }


def _instant_ns(line: TraceLine, text: str) -> int:
    with suppress(ValueError):
        # Seconds have seven digits, of which Python reads six.
        at_s = datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()
        if 0 <= at_s <= YEARS_S:
            return round(at_s * 1e6) * 1000
    raise line.error("TIMESTAMP", f"{text!r} is not a time", "write it as ISO 8601, from 1970 on")


FORMATS: Sequence[type[TraceFormat]] = (
    KvtierFormat,
    BailianFormat,
    MooncakeFormat,
    TextFormat,
    AzureFormat,
)
"""In the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Facts that a trace does not contain itself."""

    block_tokens: int = 0
    """Tokens per block; 0: those of one hash, or 64 if the trace has tokens."""
    hash_tokens: int = 0
    """Tokens per hash; 0: the default of the format."""
    tokenizer: Path | None = None
    """A tokenizer.json for traces of text."""
    requests_max: int = 0
    """Maximum number of requests to read; 0: all."""


def read_trace(path: Path, options: ReadOptions | None = None) -> Trace:
    """Read a trace, plain or compressed with xz. Raises StartError if it cannot be used."""
    options = options or ReadOptions()
    tokenizer = load_tokenizer(options.tokenizer)
    numbering = Numbering()
    requests: list[TraceRequest] = []
    style: TraceFormat | None = None
    for line in _lines(path):
        if style is None:
            style = _format_of(line, options, tokenizer)
            if style.has_header:
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


def _served(request: TraceRequest, line: TraceLine) -> TraceRequest:
    """Return the request if a node would accept it. Raises StartError if it is too long."""
    num_blocks = len(request.blocks)
    if num_blocks > CHAIN_BLOCKS_MAX:
        problem = f"has {num_blocks:,} blocks; the maximum is {CHAIN_BLOCKS_MAX:,}"
        raise line.error("", problem, "give a larger --block-tokens")
    return request


def _format_of(line: TraceLine, options: ReadOptions, tokenizer: Tokenizer) -> TraceFormat:
    for each in FORMATS:
        if each.suits(line):
            return each(line, options.block_tokens, options.hash_tokens, tokenizer)
    names = ", ".join(each.name for each in FORMATS)
    raise line.error("", "unrecognized format", f"supported formats are {names}")


def _lines(path: Path) -> Iterator[TraceLine]:
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


def _line(path: Path, number: int, text: str) -> TraceLine:
    if not text.lstrip().startswith("{"):
        return TraceLine(path, number, text.strip(), {})
    try:
        fields: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartError(
            f"{path}:{number}", f"is not valid JSON: {error}", "fix or remove it"
        ) from None
    return TraceLine(path, number, text.strip(), fields)
