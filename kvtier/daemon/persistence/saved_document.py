"""Documents kept beside the SSD's blocks: what was learned, and what key spaces are called.

Theory
------
Nothing depends on them: without its file, or with one that makes no sense, a part begins as on the
first day. But what another version of kvtier wrote is of use to that version, after the next
upgrade or rollback. So it is *set aside*, as segments are: whoever writes in its place gives it
another name, and otherwise leaves it alone. Who finds one of their own set aside goes on from that.

Rules
-----
* A file begins with its version, in every version: that much each can read of the others'.
* Of a document there are two files at most, neither longer than ``FILE_BYTES_MAX``: the SSD tier
  keeps room for that. So of other versions the last one's is set aside, and a longer one is not.
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
"""What the SSD tier keeps of its capacity for one file."""

ASIDE = ".aside"
"""Ends the name of a file that was set aside; no segment, so the tier leaves it alone."""

_BEGINNING = re.compile(rb'\s*\{\s*"version"\s*:\s*(\d{1,9})\b')
_NO_SENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading a file raises that is none of ours, or not whole."""

_SAVE_LIMIT_NS = 2_000_000_000
_WARNINGS_NS = 5 * 60 * 10**9
"""Between lines about one that cannot be kept: a disk may be read-only for days."""

T = TypeVar("T")


class SavedDocument:
    """``name`` in the SSD's ``directory``, where there is one, in the form of ``version``.

    ``what`` is in it, for the log. On the loop's thread.
    """

    def __init__(
        self, driver: Driver, directory: Path | None, *, name: str, version: int, what: str
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._name = name
        self._version = version
        self._what = what
        self._kept: tuple[Path, bytes] | None = None
        self._warnings = RateLimitedLog(_log, _WARNINGS_NS)

    def move_to(self, directory: Path) -> None:
        """Keep it there from now on, whatever is there."""
        self._directory, self._kept = directory, None

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """Return what ``parse`` makes of it; None where there is none of this version, or no sense.

        ``parse`` may raise to say so. May block as long as the disk does.
        """
        return self.read_in(self._directory, parse)

    def read_in(self, directory: Path | None, parse: Callable[[Any], T]) -> T | None:
        """Return the same of another directory; from any thread."""
        if directory is None:
            return None
        path = directory / self._name
        for each in (path, _aside(path)):
            try:
                content = read_file(each, FILE_BYTES_MAX + 1)
                if (version := _version(content)) in {None, self._version}:
                    return parse(_document(content, self._version))
                _log.info("a file of another version is left for it", path=each, version=version)
            except FileNotFoundError:
                continue
            except _NO_SENSE as error:
                _log.warning(f"{self._what} cannot be read", path=each, error=error)
        return None

    async def save(self, content: bytes) -> None:
        """Have the file say this, if it does not; where there is nothing to say there is none.

        Where there is no tier just now, or it fails, the next one says it.
        """
        executor, directory = self._driver.executors.get(STORE_TIER), self._directory
        if executor is None or directory is None or self._kept == (directory, content):
            return
        write = partial(replace_saved, directory / self._name, self._version, content)
        try:
            await executor.run_in_background(
                "save", lambda _tier, _deadline_ns: write(), _SAVE_LIMIT_NS
            )
        except (OSError, TierError) as error:
            self._warnings.warning(f"{self._what} cannot be kept", error=error)
        else:
            self._kept = directory, content


def replace_saved(path: Path, version: int, content: bytes) -> None:
    """Replace a document, all or nothing, or remove it; another version's is set aside.

    May block as long as the disk does. Raises OSError, and then it is as it was.
    """
    is_others = _version_at(path) not in {None, version}
    if content:
        replace_file(path, content, keep=_aside(path) if is_others else None)
        return
    if not is_others:
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
    """Return the version of a file; None of what is none, or is too long to be kept."""
    with contextlib.suppress(OSError):
        content = read_file(path, FILE_BYTES_MAX + 1)
        return _version(content) if len(content) <= FILE_BYTES_MAX else None
    return None


def _version(content: bytes) -> int | None:
    found = _BEGINNING.match(content)
    return int(found[1]) if found else None
