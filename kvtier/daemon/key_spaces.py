"""Which engines' blocks a key space holds: names for what is otherwise sixteen bytes of a digest.

Blocks carry no name, and outlive the engines that stored them. So the daemon notes, beside them in
the SSD's directory, what each key space's engines called themselves. Nothing depends on that file:
without it, or with one that cannot be read, operators have to name a key space by its digest.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.core.identity import HASH_BYTES
from kvtier.core.residency import TierName
from kvtier.daemon.file import read_file, replace_file
from kvtier.errors import TierError
from kvtier.node import event as ev
from kvtier.node.driver import Driver
from kvtier.node.workers import in_thread
from kvtier.observe.log import Log
from kvtier.tiers.base import Tier

__all__ = ["FILE_NAME", "KeySpaces", "NamedSpace", "SavedKeySpaces", "save_document"]

_log = Log("kvtier.daemon")

FILE_NAME = "key_spaces.json"
"""In the SSD's directory; no segment, so the tier leaves it alone."""

_SPACES_MAX = 100
"""Models of a node, in every form they were served in; the ones registered last are kept. The file
stays below 64 KiB, which the SSD tier keeps of its capacity for what is no segment."""

_NAMES_MAX = 4
_NAME_CHARS_MAX = 100
_FILE_BYTES_MAX = 1 << 20
_VERSION = 1
_SAVE_LIMIT_NS = 2_000_000_000


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
        """Return the content of the file; empty where nothing is known."""
        if not self._known:
            return b""
        spaces = [
            {
                "key_space": key_space.hex(),
                "names": list(named.names),
                "block_tokens": named.block_tokens,
            }
            for key_space, named in self._known.items()
        ]
        return json.dumps({"version": _VERSION, "key_spaces": spaces}, indent=1).encode()


class SavedKeySpaces(KeySpaces):
    """Key spaces that ``driver`` meets, kept in the SSD's ``directory`` where there is one."""

    def __init__(self, driver: Driver, directory: Path | None) -> None:
        super().__init__(_load(directory) if directory else {})
        self._driver = driver
        self._directory = directory
        self._saving: asyncio.Task[None] | None = None
        self._is_stale = False

    def registered(self, event: ev.Register) -> None:
        """Note an engine that was let in."""
        if self.note(event.key_space, event.engine, event.layout.block_tokens):
            self._save()

    async def move_to(self, directory: Path) -> None:
        """Keep them there from now on, and know those too that are there."""
        known = await in_thread(partial(_load, directory), "kvtier-load")
        self.add(known)
        self._directory = directory
        self._save()

    def forget_unused(self) -> None:
        """Forget those without an engine and without a block in any tier."""
        node = self._driver.node
        index = node.cache.index
        in_use = set(index.scope[index.rows()].tolist())
        with_blocks = {scope.key_space for number, scope in index.scopes() if number in in_use}
        self.keep_only(with_blocks | {each.key_space for each in node.sessions.values()})
        self._save()

    def _save(self) -> None:
        """Have the file written, one write at a time, the last one with all there is to say."""
        if self._directory is None:
            return
        self._is_stale = True
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._is_stale and (crew := self._driver.crews.get(TierName.SSD)) is not None:
            assert self._directory is not None, "it moves, and is not given up"
            self._is_stale = False
            save = partial(_save_beside, self._directory, self.document())
            try:
                await crew.apart("save", save, _SAVE_LIMIT_NS)
            except (OSError, TierError) as error:
                _log.warning("names of key spaces cannot be saved", error=error)


def save_document(directory: Path, document: bytes) -> None:
    """Replace the file of a directory, all or nothing, or remove it where there is nothing to say.

    May block as long as the disk does.
    """
    path = directory / FILE_NAME
    if document:
        replace_file(path, document)
    else:
        path.unlink(missing_ok=True)


def _save_beside(directory: Path, document: bytes, _tier: Tier, _deadline_ns: int) -> None:
    save_document(directory, document)


def _load(directory: Path) -> dict[bytes, NamedSpace]:
    """Read the file of a directory; nothing is known where it is missing or no good."""
    path = directory / FILE_NAME
    try:
        return dict(_parse(json.loads(read_file(path, _FILE_BYTES_MAX))))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _log.warning("names of key spaces cannot be read", path=path, error=error)
        return {}


def _parse(document: Any) -> Iterable[tuple[bytes, NamedSpace]]:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}")
    for each in document["key_spaces"][-_SPACES_MAX:]:
        key_space = bytes.fromhex(each["key_space"])
        names = tuple(str(name)[:_NAME_CHARS_MAX] for name in each["names"][:_NAMES_MAX])
        block_tokens = int(each["block_tokens"])
        if len(key_space) != HASH_BYTES or block_tokens < 1:
            raise ValueError(f"no key space: {each['key_space']}")
        yield key_space, NamedSpace(names, block_tokens)
