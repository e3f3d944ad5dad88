"""Commands out and replies in: the bytes themselves, however they are cut on the way."""

import socket
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import TierTimeout
from kvtier.testing.block import make_block
from kvtier.tiers.redis.connection import ServerConnection
from kvtier.tiers.redis.resp import (
    ErrorReply,
    ProtocolError,
    Reply,
    ReplyReader,
    RespCommand,
    encode,
)
from kvtier.tiers.redis.value import HEAD_BYTES, PARTS_MAX, parse_stored

LONG = bytes(range(256)) * 200


class Wire:
    """Gives bytes in pieces of given sizes, again and again; then it is at its end."""

    def __init__(self, stream: bytes, sizes: list[int]) -> None:
        self._stream = stream
        self._sizes = sizes
        self._num_reads = 0

    def receive(self, view: memoryview) -> int:
        assert len(view), "nothing is asked for"
        size = min(len(view), self._sizes[self._num_reads % len(self._sizes)])
        self._num_reads += 1
        piece, self._stream = self._stream[:size], self._stream[size:]
        if not piece:
            raise EOFError
        view[: len(piece)] = piece
        return len(piece)


def wire_of(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, ErrorReply):
        return b"-%s and some text\r\n" % reply.code.encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%s\r\n" % (len(reply), reply)
    return b"*%d\r\n" % len(reply) + b"".join(map(wire_of, reply))


simple = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.binary(max_size=40)
    | st.sampled_from([ErrorReply("OOM"), ErrorReply("MOVED"), LONG[:700], b"\r\n$3\r\n"])
)
replies = st.lists(st.recursive(simple, lambda inner: st.lists(inner, max_size=4), max_leaves=8))
sizes = st.lists(st.sampled_from([3, 7, 100, 20_000, 1 << 20]), min_size=1, max_size=5)


@given(replies, sizes)
def test_replies_are_read_however_they_are_cut(expected: list[Reply], cuts: list[int]) -> None:
    reader = ReplyReader(Wire(b"".join(map(wire_of, expected)), cuts).receive)
    assert [reader.read() for _ in expected] == expected
    with pytest.raises(EOFError):
        reader.read()


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=4), st.integers(0, 70_000), sizes)
def test_a_value_goes_where_it_belongs(rooms: list[int], length: int, cuts: list[int]) -> None:
    value = (LONG * 2)[:length]
    reader = ReplyReader(Wire(wire_of(value) + wire_of(7), cuts).receive)
    memory = bytearray(b"\xa5" * (sum(rooms) + 10))
    views, start = [], 5
    for room in rooms:
        views.append(memoryview(memory)[start : start + room])
        start += room
    assert reader.read(views) == length
    kept = min(length, sum(rooms))
    assert memory[5 : 5 + kept] == value[:kept]
    assert set(memory[:5] + memory[5 + kept :]) == {0xA5}, "nothing else is touched"
    assert reader.read() == 7, "what was left over has been dropped"


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 200 OK\r\n",
        b"\r\n",
        b"$x\r\n",
        b"$3\r\nabcd\r\n",
        b"*5000000\r\n",
        b"*1\r\n" * 2000,
        b":\r\n",
        b"+" + b"x" * 20_000 + b"\r\n",
    ],
)
def test_garbage_is_told_from_replies(garbage: bytes) -> None:
    with pytest.raises(ProtocolError):
        ReplyReader(Wire(garbage, [1 << 20]).receive).read()


@pytest.mark.slow
@pytest.mark.parametrize(
    "element", [b"$1000000\r\n" + b"x" * 1_000_000 + b"\r\n", b"*1000\r\n" + b":1\r\n" * 1000]
)
def test_an_endless_reply_is_rejected(element: bytes) -> None:
    wire = Wire(b"", [1 << 20])

    def receive(view: memoryview) -> int:
        wire._stream = wire._stream or element
        return wire.receive(view)

    wire._stream = b"*1000000\r\n"
    with pytest.raises(ProtocolError):
        ReplyReader(receive).read()


def test_a_refusal_is_a_word_of_its_own_and_never_quotes() -> None:
    texts = {
        b"-WRONGPASS invalid username\r\n": "WRONGPASS",
        b"-ERR unknown command 'secret'\r\n": "ERR",
        b"-secret\r\n": "ERR",
        b"-\r\n": "ERR",
        b"-ERR max number of clients reached\r\n": "MAXCLIENTS",
    }
    for text, code in texts.items():
        assert ReplyReader(Wire(text, [3]).receive).read() == ErrorReply(code)


words = st.lists(
    st.binary(max_size=30)
    | st.lists(st.binary(max_size=30) | st.just(LONG), max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)


@given(st.lists(words, min_size=1, max_size=4))
def test_commands_are_arrays_of_strings(commands: list[list[bytes | tuple[bytes, ...]]]) -> None:
    pieces = encode([RespCommand(tuple(command)) for command in commands])
    whole = [[b"".join(w) if isinstance(w, tuple) else w for w in command] for command in commands]
    assert b"".join(pieces) == b"".join(map(wire_of, whole))


def test_long_pieces_are_not_copied() -> None:
    payload = memoryview(LONG)
    pieces = encode([RespCommand((b"SET", b"k", (b"head", payload), b"PX", b"1"))])
    assert any(piece is payload for piece in pieces)
    assert len(pieces) == 3


class Connection:
    """One to a server that reads and never answers."""

    def __init__(self, ours: socket.socket) -> None:
        self._sock = ours

    def connect(self) -> None:
        """Be there already."""

    def disconnect(self) -> None:
        self._sock.close()


def test_a_block_counts_only_for_the_bytes_that_are_stored() -> None:
    header = replace(make_block(1, 100).header, payload_bytes=1 << 63)
    assert parse_stored(header.pack(), HEAD_BYTES + 100).num_bytes <= PARTS_MAX * 100
    assert parse_stored(make_block(1, 100).header.pack(), HEAD_BYTES + 100).num_bytes == 100


def test_no_more_bytes_are_asked_for_than_a_server_should_hold() -> None:
    ours, server = socket.socketpair()
    link = ServerConnection(Connection(ours), timeout_s=0.05)
    into = memoryview(bytearray(1 << 20))
    asked = [RespCommand((b"GET", b"key-%d" % number), (into,)) for number in range(50)]
    with pytest.raises(TierTimeout):
        link.ask(asked, time.monotonic_ns() + 10**10)
    assert server.recv(1 << 16).count(b"GET") == 2, "two megabytes"
    link.close()
    server.close()
