"""Removes blocks with all their values: some by hash, or a selection by walking the keys.

It uses UNLINK, so that the server frees memory in the background; SCAN only for a purge, an
operator's command; KEYS never. The head goes first: a block that is half removed is absent.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from kvtier.core.identity import HASH_BYTES, Selection
from kvtier.errors import TierError
from kvtier.tiers.base import Removed
from kvtier.tiers.redis.resp import ErrorReply, Reply, RespCommand
from kvtier.tiers.redis.server import Server
from kvtier.tiers.redis.value import HEAD_BYTES, StoredValue, parse_stored

__all__ = ["purge", "unlink", "unlink_keys"]

_KEYS_PER_COMMAND = 256
_KEYS_PER_SCAN = 512
"""A server serves no other client during a command; these take far less than a millisecond."""

_KEYS_PER_GROUP = 16_384
"""Keys named at once, of several blocks: a few megabytes of memory here."""


def unlink(server: Server, heads: Sequence[bytes], deadline_ns: int) -> Removed:
    """Remove the blocks with these head keys and count those that existed. Raises TierError."""
    return _unlink_stored(server, heads, _stored_values(server, heads, deadline_ns), deadline_ns)


def unlink_keys(server: Server, keys: Sequence[bytes], deadline_ns: int) -> None:
    """Remove values of one block, which share a slot."""
    _ask(server, _unlinks(keys), deadline_ns)


def purge(server: Server, prefix: bytes, selection: Selection, deadline_ns: int) -> Removed:
    """Remove the blocks of a selection from one server, and parts whose head is missing.

    Raises TierTimeout at the deadline, and TierError if the server refuses; blocks removed until
    then stay removed.
    """
    ours = re.compile(re.escape(prefix) + rb"\{[0-9a-f]{%d}\}(:[0-9]+)?" % (2 * HASH_BYTES))
    glob = re.sub(rb"([*?\[\]\\])", rb"\\\1", prefix) + b"{*"
    removed = Removed()
    cursor: Reply = b"0"
    while True:
        scan = RespCommand(
            (b"SCAN", _text(cursor), b"MATCH", glob, b"COUNT", b"%d" % _KEYS_PER_SCAN)
        )
        (page,) = _ask(server, [scan], deadline_ns)
        cursor, keys = page if isinstance(page, list) and len(page) == 2 else (b"0", [])
        found = [match for key in _list(keys) if (match := ours.fullmatch(_text(key)))]
        heads = [match[0] for match in found if not match[1]]
        stored = _stored_values(server, heads, deadline_ns)
        meant = [index for index, block in enumerate(stored) if _is_selected(block, selection)]
        removed += _unlink_stored(
            server, [heads[i] for i in meant], [stored[i] for i in meant], deadline_ns
        )
        parts = [match[0] for match in found if match[1]]
        _unlink_orphans(server, parts, deadline_ns)
        if cursor == b"0":
            return removed


def _is_selected(stored: StoredValue, selection: Selection) -> bool:
    if stored.header is None:
        return selection.is_all
    return selection.has(stored.header.key_space, stored.header.tenant)


def _stored_values(server: Server, heads: Sequence[bytes], deadline_ns: int) -> list[StoredValue]:
    commands: list[RespCommand] = []
    for head in heads:
        commands.append(RespCommand((b"GETRANGE", head, b"0", b"%d" % (HEAD_BYTES - 1))))
        commands.append(RespCommand((b"STRLEN", head)))
    replies = _ask(server, commands, deadline_ns)
    return [parse_stored(*pair) for pair in zip(replies[::2], replies[1::2], strict=True)]


def _unlink_stored(
    server: Server, heads: Sequence[bytes], stored: Sequence[StoredValue], deadline_ns: int
) -> Removed:
    num_blocks = num_bytes = 0
    for group in _groups(zip(heads, stored, strict=True)):
        commands = [RespCommand((b"UNLINK", head)) for head, _ in group]
        for head, block in group:
            parts = [b"%s:%d" % (head, part) for part in range(1, block.num_parts)]
            commands += _unlinks(parts)
        replies = _ask(server, commands, deadline_ns)[: len(group)]
        gone = [block for (_, block), reply in zip(group, replies, strict=True) if reply == 1]
        num_blocks += len(gone)
        num_bytes += sum(block.num_bytes for block in gone)
    return Removed(num_blocks, num_bytes)


def _groups(
    blocks: Iterable[tuple[bytes, StoredValue]],
) -> Iterator[list[tuple[bytes, StoredValue]]]:
    """Split blocks by their number of values: a forged head may claim thousands of them."""
    group: list[tuple[bytes, StoredValue]] = []
    num_keys = 0
    for head, block in blocks:
        group.append((head, block))
        num_keys += block.num_parts
        if num_keys >= _KEYS_PER_GROUP:
            yield group
            group, num_keys = [], 0
    if group:
        yield group


def _unlinks(keys: Sequence[bytes]) -> list[RespCommand]:
    starts = range(0, len(keys), _KEYS_PER_COMMAND)
    return [RespCommand((b"UNLINK", *keys[start : start + _KEYS_PER_COMMAND])) for start in starts]


def _unlink_orphans(server: Server, parts: Sequence[bytes], deadline_ns: int) -> None:
    """Remove parts without a head: their owner is unknown."""
    if not parts:
        return
    heads = [RespCommand((b"EXISTS", part.rpartition(b":")[0])) for part in parts]
    replies = _ask(server, heads, deadline_ns)
    orphans = [part for part, reply in zip(parts, replies, strict=True) if reply == 0]
    _ask(server, [RespCommand((b"UNLINK", part)) for part in orphans], deadline_ns)


def _ask(server: Server, commands: Sequence[RespCommand], deadline_ns: int) -> list[Reply]:
    """Return the replies; a refused removal must not look like a removal of nothing."""
    replies = server.ask(commands, deadline_ns) if commands else []
    for reply in replies:
        if isinstance(reply, ErrorReply) and reply.code != "WRONGTYPE":
            why = "slots are on their way to another server" if reply.is_elsewhere else server.limit
            raise TierError(f"remote: not removed: {why}")
    return replies


def _text(reply: Reply) -> bytes:
    return reply if isinstance(reply, bytes) else b""


def _list(reply: Reply) -> list[Reply]:
    return reply if isinstance(reply, list) else []
