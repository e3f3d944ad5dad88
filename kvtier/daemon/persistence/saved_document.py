"""Saves documents beside the blocks of the SSD tier: the learned state and names of key spaces.

Theory
------
Nothing depends on these documents: without a valid file, a component starts with no state. But a
file of another kvtier version is useful to that version after the next upgrade or rollback. So it
is *set aside* like segments are: it gets another name when a new file replaces it. A version that
finds its own file set aside continues from it.

Rules
-----
* In all versions, a file begins with its version number, so that every version can read it.
* A document has at most two files of at most ``FILE_BYTES_MAX``: the SSD tier reserves that space.
  So only the latest file of another version is set aside, and a longer one is not.
"""

import contextlib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvtier.core.tier_registry import STORE_TIER
from kvtier.daemon.persistence.whole_file import read_file, replace_file
from kvtier.errors import TierError
from kvtier.observe.log import Log, RateLimitedLog
from kvtier.runtime.driver import Driver

__all__ = ["ASIDE", "FILE_BYTES_MAX", "SavedDocument", "replace_saved"]

_log = Log("kvtier.daemon")

FILE_BYTES_MAX = 64 << 10
"""Space that the SSD tier reserves for one file."""

ASIDE = ".aside"
"""Suffix of files that are set aside; the tier ignores them because they are not segments."""

_BEGINNING = re.compile(rb'\s*\{\s*"version"\s*:\s*(\d{1,9})\b')
_INVALID = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Exceptions from reading a file that is foreign or incomplete."""

_SAVE_LIMIT_NS = 2_000_000_000
_WARNINGS_NS = 5 * 60 * 10**9
"""Time between warnings about a document: a disk may be read-only for days."""

T = TypeVar("T")


class SavedDocument:
    """The file ``name`` in ``directory``, if there is one, in the format ``version``.

    ``what`` describes its content in the log. For the loop's thread.
    """

    def __init__(
        self, driver: Driver, directory: Path | None, *, name: str, version: int, what: str
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._name = name
        self._version = version
        self._what = what
        self._saved: tuple[Path, bytes] | None = None
        self._warnings = RateLimitedLog(_log, _WARNINGS_NS)

    def move_to(self, directory: Path) -> None:
        """Save to another directory from now on, whatever it contains."""
        self._directory, self._saved = directory, None

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """Return the parsed content; None if there is no valid file of this version.

        ``parse`` may raise if the content is invalid. May block as long as the disk does.
        """
        return self.read_in(self._directory, parse)

    def read_in(self, directory: Path | None, parse: Callable[[Any], T]) -> T | None:
        """Read the file in another directory; from any thread."""
        if directory is None:
            return None
        path = directory / self._name
        for each in (path, _aside(path)):
            try:
                content = read_file(each, FILE_BYTES_MAX + 1)
                if (version := _version(content)) in {None, self._version}:
                    return parse(_document(content, self._version))
                _log.info("file of another version left alone", path=each, version=version)
            except FileNotFoundError:
                continue
            except _INVALID as error:
                _log.warning(f"{self._what} cannot be read", path=each, error=error)
        return None

    async def save(self, content: bytes) -> None:
        """Write the content if it has changed; empty content removes the file.

        Does nothing while the tier is detached; after an error, the next call tries again.
        """
        executor, directory = self._driver.executors.get(STORE_TIER), self._directory
        if executor is None or directory is None or self._saved == (directory, content):
            return
        write = partial(replace_saved, directory / self._name, self._version, content)
        try:
            await executor.run_in_background(
                "save", lambda _tier, _deadline_ns: write(), _SAVE_LIMIT_NS
            )
        except (OSError, TierError) as error:
            self._warnings.warning(f"{self._what} cannot be saved", error=error)
        else:
            self._saved = directory, content


def replace_saved(path: Path, version: int, content: bytes) -> None:
    """Replace a document atomically, or remove it; one of another version is set aside.

    May block as long as the disk does. Raises OSError, and then nothing has changed.
    """
    is_foreign = _version_at(path) not in {None, version}
    if content:
        replace_file(path, content, keep=_aside(path) if is_foreign else None)
        return
    if not is_foreign:
        path.unlink(missing_ok=True)
    if _version_at(_aside(path)) == version:
        _aside(path).unlink()


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ASIDE)


def _document(content: bytes, version: int) -> Any:
    document = json.loads(content)
    if document["version"] != version:
        raise ValueError(f"version {document['version']}")
    return document


def _version_at(path: Path) -> int | None:
    """Return the version of a file; None if it is missing, invalid or too long."""
    with contextlib.suppress(OSError):
        content = read_file(path, FILE_BYTES_MAX + 1)
        return _version(content) if len(content) <= FILE_BYTES_MAX else None
    return None


def _version(content: bytes) -> int | None:
    found = _BEGINNING.match(content)
    return int(found[1]) if found else None
