"""Which engines' blocks a key space holds: names for what is otherwise sixteen bytes of a digest.

Blocks carry no name, and outlive the engines that stored them. So the daemon notes, beside them in
the SSD's directory, what each key space's engines called themselves. Without that file operators
have to name a key space by its digest.
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
"""Models of a node, in every form they were served in; the ones registered last are kept."""

_NAMES_MAX = 4
_NAME_CHARS_MAX = 100
_VERSION = 1


@dataclass(frozen=True, slots=True)
class NamedSpace:
    """What is known of a key space besides its blocks; the newest name comes first."""

    names: tuple[str, ...]
    block_tokens: int


class KeySpaces:
    """Key spaces by digest, the ones registered last at the end; on one thread."""

    def __init__(self, known: Mapping[bytes, NamedSpace] | None = None) -> None:
        self._known = dict(known or {})

    def __iter__(self) -> Iterator[tuple[bytes, NamedSpace]]:
        return iter(self._known.items())

    def get(self, key_space: bytes) -> NamedSpace | None:
        """Return what is known of a key space."""
        return self._known.get(key_space)

    def note(self, key_space: bytes, name: str, block_tokens: int) -> bool:
        """Learn of an engine; True where that was new."""
        name = " ".join(name.split())[:_NAME_CHARS_MAX]
        before = self._known.pop(key_space, NamedSpace((), block_tokens))
        names = (name, *(other for other in before.names if other != name))[:_NAMES_MAX]
        after = replace(before, names=names, block_tokens=block_tokens)
        self._known[key_space] = after
        while len(self._known) > _SPACES_MAX:
            del self._known[next(iter(self._known))]
        return after != before

    def add(self, known: Mapping[bytes, NamedSpace]) -> None:
        """Learn of others; what is known already stays as it is."""
        self._known = {**known, **self._known}
        while len(self._known) > _SPACES_MAX:
            del self._known[next(iter(self._known))]

    def keep_only(self, key_spaces: Iterable[bytes]) -> None:
        """Forget all the others."""
        kept = set(key_spaces)
        self._known = {each: named for each, named in self._known.items() if each in kept}

    def document(self) -> bytes:
        """Return the content of the file, without the oldest where all are too long for it.

        Empty where nothing is known.
        """
        known = list(self._known.items())
        while len(content := _written(known)) > FILE_BYTES_MAX:
            del known[: 1 + len(known) // 8]
        return content


class SavedKeySpaces(KeySpaces):
    """Key spaces that ``driver`` meets, kept in the SSD's ``directory`` where there is one."""

    def __init__(self, driver: Driver, directory: Path | None) -> None:
        self._driver = driver
        self._file = SavedDocument(
            driver, directory, name=FILE_NAME, version=_VERSION, what="names of key spaces"
        )
        self._saving: asyncio.Task[None] | None = None
        self._is_stale = False
        super().__init__(self._file.read(_parse))

    def registered(self, event: ev.Register) -> None:
        """Note an engine that was let in."""
        if self.note(event.key_space, event.engine, event.layout.block_tokens):
            self._begin_save()

    async def move_to(self, directory: Path) -> None:
        """Keep them there from now on, and know those too that are there."""
        self._file.move_to(directory)
        known = await run_in_thread(partial(self._file.read, _parse), "kvtier-load")
        self.add(known or {})
        self._begin_save()

    def forget_unused(self) -> None:
        """Forget those without an engine and without a block in any tier."""
        node = self._driver.node
        index = node.cache.index
        in_use = set(index.scope[index.rows()].tolist())
        with_blocks = {scope.key_space for number, scope in index.scopes() if number in in_use}
        self.keep_only(with_blocks | {each.key_space for each in node.sessions.values()})
        self._begin_save()

    async def save(self) -> None:
        """Keep what is known now, where that has changed."""
        self._is_stale = True
        while self._is_stale:  # more may come meanwhile
            self._is_stale = False
            await self._file.save(self.document())

    def _begin_save(self) -> None:
        """Have it kept, one write at a time, the last one with all there is to say."""
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
        raise ValueError(f"no key space: {each['key_space']}")
    return key_space, NamedSpace(names, block_tokens)
