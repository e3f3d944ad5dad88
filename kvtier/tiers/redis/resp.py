"""The Redis protocol (RESP 2): encodes commands and reads replies without copying payloads.

The library's own reader passes replies through Python buffers, which halves the speed for 1 MiB
values and holds memory that grows. Here a value goes from the socket directly to its destination.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = [
    "ErrorReply",
    "Piece",
    "ProtocolError",
    "Reply",
    "ReplyReader",
    "RespCommand",
    "Word",
    "encode",
]

_BUFFER_BYTES = 16 << 10
"""Buffer for replies other than values; longer ones are read in pieces."""

_LINE_BYTES_MAX = 8 << 10
_STRING_BYTES_MAX = 1 << 20
"""Longest string read without a destination buffer; only foreign keys are longer."""

_ARRAY_LENGTH_MAX = 1 << 20
_DEPTH_MAX = 8
"""Maximum depth of nested arrays; a cluster's slot map has three levels."""

_REPLY_BYTES_MAX = 64 << 20
"""Maximum size of a reply with its elements; a page of SCAN or a slot map takes far less."""

_ELEMENT_BYTES = 64
"""Memory per element in addition to its text."""

_JOINED_BYTES_MAX = 2 << 10
"""Shorter pieces are joined before sending: a copy costs less than another element of a vector."""

Piece = bytes | memoryview
Word = bytes | tuple[Piece, ...]
"""An argument of a command, whole or in pieces that are sent one after another."""


class ProtocolError(ValueError):
    """The bytes are not a reply of a Redis server."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error reply: its first word only, since the rest may quote what was sent."""

    code: str

    @property
    def is_elsewhere(self) -> bool:
        """Return whether another server of the cluster has the key, or may have it."""
        return self.code in {"MOVED", "ASK", "TRYAGAIN"}


Reply = int | bytes | ErrorReply | list["Reply"] | None


@dataclass(frozen=True, slots=True)
class RespCommand:
    """One command: its words, of which one may be in pieces, and where its reply goes.

    With ``into``, a string reply fills these views one after another, the rest is dropped, and the
    reply is the length of the string.
    """

    words: tuple[Word, ...]
    into: tuple[memoryview, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Return about how many bytes the command transfers in either direction."""
        sent = sum(len(piece) for word in self.words if isinstance(word, tuple) for piece in word)
        return sent + sum(map(len, self.into))


def encode(commands: Sequence[RespCommand]) -> list[Piece]:
    """Return the bytes to send. Long pieces are those given, not copies."""
    pieces: list[Piece] = []
    joined = bytearray()
    for command in commands:
        joined += b"*%d\r\n" % len(command.words)
        for word in command.words:
            parts = word if isinstance(word, tuple) else (word,)
            joined += b"$%d\r\n" % sum(map(len, parts))
            for part in parts:
                if len(part) <= _JOINED_BYTES_MAX:
                    joined += part
                    continue
                pieces += (bytes(joined), part)
                joined.clear()
            joined += b"\r\n"
    pieces.append(bytes(joined))
    return pieces


class ReplyReader:
    """Reads replies from ``receive``, which fills a view with at least one byte, or raises."""

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._bytes = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._bytes)
        self._start = self._end = 0
        self._left_bytes = 0
        """Memory that the rest of the current reply may take."""

    def read(self, into: Sequence[memoryview] = ()) -> Reply:
        """Return the next reply. Raises ProtocolError; after that nothing more can be read."""
        self._left_bytes = _REPLY_BYTES_MAX
        return self._read(into, 0)

    def _read(self, into: Sequence[memoryview], depth: int) -> Reply:
        line = self._line()
        self._take_memory(len(line) + _ELEMENT_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(_code(rest))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._string(_number(rest), into)
        if kind == b"*":
            return self._array(_number(rest), depth + 1)
        raise ProtocolError("unknown reply type")

    def _array(self, length: int, depth: int) -> Reply:
        if length > _ARRAY_LENGTH_MAX or depth > _DEPTH_MAX:
            raise ProtocolError("array too long or nested too deep")
        return None if length < 0 else [self._read((), depth) for _ in range(length)]

    def _take_memory(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise ProtocolError("reply too large")

    def _string(self, length: int, into: Sequence[memoryview]) -> Reply:
        if length < 0:
            return None
        left = length
        if into:
            for view in into:
                part = view[:left]
                self._fill(part)
                left -= len(part)
            self._skip(left)
        elif length <= _STRING_BYTES_MAX:
            self._take_memory(length)
            text = bytearray(length)
            self._fill(memoryview(text))
        else:
            text = bytearray()
            self._skip(length)
        if self._take(2) != b"\r\n":
            raise ProtocolError("string with a wrong length")
        return length if into else bytes(text)

    def _line(self) -> bytes:
        while (at := self._bytes.find(b"\r\n", self._start, self._end)) < 0:
            if self._end - self._start > _LINE_BYTES_MAX:
                raise ProtocolError("unterminated line")
            self._more()
        line = bytes(self._view[self._start : at])
        self._start = at + 2
        return line

    def _take(self, length: int) -> bytes:
        while self._end - self._start < length:
            self._more()
        taken = bytes(self._view[self._start : self._start + length])
        self._start += length
        return taken

    def _more(self) -> None:
        """Receive after the buffered bytes, which move to the front."""
        left = self._end - self._start
        self._view[:left] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, left
        self._end += self._receive(self._view[left:])

    def _fill(self, view: memoryview) -> None:
        """Fill ``view`` from the buffer, then directly from the connection."""
        ahead = min(len(view), self._end - self._start)
        view[:ahead] = self._view[self._start : self._start + ahead]
        self._start += ahead
        while ahead < len(view):
            ahead += self._receive(view[ahead:])

    def _skip(self, length: int) -> None:
        ahead = min(length, self._end - self._start)
        self._start += ahead
        length -= ahead
        while length:
            self._start = self._end = 0
            length -= self._receive(self._view[:length])


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError:
        raise ProtocolError("not a number") from None


def _code(text: bytes) -> str:
    if text.startswith(b"ERR max number of clients"):
        return "MAXCLIENTS"  # the only relevant error without a code
    found = re.match(rb"[A-Z]{2,20}\b", text)
    return found[0].decode() if found else "ERR"
