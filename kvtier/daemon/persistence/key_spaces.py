"""Records the names of the engines that use each key space.

Blocks have no names, and outlive the engines that stored them. So the daemon saves the names of a
key space's engines beside the blocks. Without that file, operators must use its digest.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.core.identity import HASH_BYTES
from kvtier.daemon.persistence.saved_document import FILE_BYTES_MAX, SavedDocument
from kvtier.node.messages import events as ev
from kvtier.runtime.driver import Driver
from kvtier.runtime.worker_pool import run_in_thread

__all__ = ["FILE_NAME", "KeySpaces", "NamedSpace", "SavedKeySpaces"]

FILE_NAME = "key_spaces.json"

_SPACES_MAX = 100
"""Maximum number of key spaces; the most recently registered ones are kept."""

_NAMES_MAX = 4
_NAME_CHARS_MAX = 100
_VERSION = 1


@dataclass(frozen=True, slots=True)
class NamedSpace:
    """Names of a key space's engines, newest first, and the tokens per block."""

    names: tuple[str, ...]
    block_tokens: int


class KeySpaces:
    """Key spaces by digest, most recently registered last; for one thread."""

    def __init__(self, known: Mapping[bytes, NamedSpace] | None = None) -> None:
        self._known = dict(known or {})

    def __iter__(self) -> Iterator[tuple[bytes, NamedSpace]]:
        return iter(self._known.items())

    def get(self, key_space: bytes) -> NamedSpace | None:
        """Return a key space, or None if it is unknown."""
        return self._known.get(key_space)

    def note(self, key_space: bytes, name: str, block_tokens: int) -> bool:
        """Record an engine; returns whether that changed anything."""
        name = " ".join(name.split())[:_NAME_CHARS_MAX]
        before = self._known.pop(key_space, NamedSpace((), block_tokens))
        names = (name, *(other for other in before.names if other != name))[:_NAMES_MAX]
        after = replace(before, names=names, block_tokens=block_tokens)
        self._known[key_space] = after
        while len(self._known) > _SPACES_MAX:
            del self._known[next(iter(self._known))]
        return after != before

    def add(self, known: Mapping[bytes, NamedSpace]) -> None:
        """Add key spaces; known ones stay unchanged."""
        self._known = {**known, **self._known}
        while len(self._known) > _SPACES_MAX:
            del self._known[next(iter(self._known))]

    def keep_only(self, key_spaces: Iterable[bytes]) -> None:
        """Forget all other key spaces."""
        kept = set(key_spaces)
        self._known = {each: named for each, named in self._known.items() if each in kept}

    def document(self) -> bytes:
        """Return the content of the file, without the oldest key spaces if it would be too long.

        Empty if no key space is known.
        """
        known = list(self._known.items())
        while len(content := _written(known)) > FILE_BYTES_MAX:
            del known[: 1 + len(known) // 8]
        return content


class SavedKeySpaces(KeySpaces):
    """Key spaces of the engines of ``driver``, saved in ``directory`` if there is one."""

    def __init__(self, driver: Driver, directory: Path | None) -> None:
        self._driver = driver
        self._file = SavedDocument(
            driver, directory, name=FILE_NAME, version=_VERSION, what="names of key spaces"
        )
        self._saving: asyncio.Task[None] | None = None
        self._is_stale = False
        super().__init__(self._file.read(_parse))

    def registered(self, event: ev.Register) -> None:
        """Record a registered engine."""
        if self.note(event.key_space, event.engine, event.layout.block_tokens):
            self._begin_save()

    async def move_to(self, directory: Path) -> None:
        """Save to another directory, and add the key spaces saved there."""
        self._file.move_to(directory)
        known = await run_in_thread(partial(self._file.read, _parse), "kvtier-load")
        self.add(known or {})
        self._begin_save()

    def forget_unused(self) -> None:
        """Forget key spaces with neither an engine nor a block in any tier."""
        node = self._driver.node
        index = node.cache.index
        in_use = set(index.scope[index.rows()].tolist())
        with_blocks = {scope.key_space for number, scope in index.scopes() if number in in_use}
        self.keep_only(with_blocks | {each.key_space for each in node.sessions.values()})
        self._begin_save()

    async def save(self) -> None:
        """Save the key spaces if they have changed."""
        self._is_stale = True
        while self._is_stale:  # may change meanwhile
            self._is_stale = False
            await self._file.save(self.document())

    def _begin_save(self) -> None:
        """Save in the background, one write at a time; the last one has all changes."""
        self._is_stale = True
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self.save())


def _written(known: Iterable[tuple[bytes, NamedSpace]]) -> bytes:
    spaces = [
        {
            "key_space": key_space.hex(),
            "names": list(named.names),
            "block_tokens": named.block_tokens,
        }
        for key_space, named in known
    ]
    document = {"version": _VERSION, "key_spaces": spaces}
    return json.dumps(document, indent=1).encode() if spaces else b""


def _parse(document: Any) -> dict[bytes, NamedSpace]:
    return dict(map(_space_of, document["key_spaces"][-_SPACES_MAX:]))


def _space_of(each: Any) -> tuple[bytes, NamedSpace]:
    key_space = bytes.fromhex(each["key_space"])
    names = tuple(str(name)[:_NAME_CHARS_MAX] for name in each["names"][:_NAMES_MAX])
    block_tokens = int(each["block_tokens"])
    if len(key_space) != HASH_BYTES or block_tokens < 1:
        raise ValueError(f"not a key space: {each['key_space']}")
    return key_space, NamedSpace(names, block_tokens)
