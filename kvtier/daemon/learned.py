"""What was learned of tiers, engines and traffic, kept beside the SSD's blocks across restarts.

Nothing depends on the file: without it, or with one that cannot be read, the models begin as they
did on the first day, and learn again. It holds speeds, counts and the words that clients have for
kinds of requests, but no hashes, tenants or text.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvtier.core.residency import TierName
from kvtier.daemon.file import read_file, replace_file
from kvtier.errors import TierError
from kvtier.node.driver import Driver
from kvtier.observe.log import Log
from kvtier.tiers.base import Tier

__all__ = ["FILE_NAME", "Learned", "Learner"]

_log = Log("kvtier.daemon")

FILE_NAME = "learned.json"
"""In the SSD's directory; no segment, so the tier leaves it alone."""

_FILE_BYTES_MAX = 32 << 10
"""What the SSD tier keeps of its capacity for this file."""

_VERSION = 1
_SAVE_LIMIT_NS = 2_000_000_000


class Learner(Protocol):
    """A model that learns while it runs."""

    def document(self) -> Mapping[str, Any]:
        """Return what was learned; all of it can be written as JSON."""

    def recall(self, document: Mapping[str, Any]) -> str | None:
        """Take what an earlier run learned, or say why it makes no sense; it is ignored then."""


class Learned:
    """Keeps what ``learners`` know in ``directory``, where there is one; ``recall`` first.

    Those that matter most come first: where there is no room for all, the last are left out. On the
    loop's thread.
    """

    def __init__(
        self, driver: Driver, learners: Mapping[str, Learner], directory: Path | None
    ) -> None:
        self._driver = driver
        self._learners = learners
        self._directory = directory
        self._kept = b""

    def move_to(self, directory: Path) -> None:
        """Keep it there from now on, and what is there not."""
        self._directory, self._kept = directory, b""

    def recall(self) -> None:
        """Tell the learners what the last run has kept."""
        if self._directory is None:
            return
        for name, document in _load(self._directory).items():
            if name not in self._learners or not isinstance(document, dict):
                continue
            if fault := self._learners[name].recall(document):
                _log.warning("what was learned before makes no sense", of=name, error=fault)

    async def save(self) -> None:
        """Keep what is known now, where that has changed."""
        content, crew = self._content(), self._driver.crews.get(TierName.SSD)
        if self._directory is None or crew is None or content == self._kept:
            return
        write = partial(_save_beside, self._directory, content)
        try:
            await crew.apart("save", write, _SAVE_LIMIT_NS)
        except (OSError, TierError) as error:
            _log.warning("what was learned cannot be kept", error=error)
        else:
            self._kept = content

    def _content(self) -> bytes:
        learned = {name: each.document() for name, each in self._learners.items()}
        while len(content := _written(learned)) > _FILE_BYTES_MAX:
            name, _ = learned.popitem()
            _log.warning("what was learned is too long to be kept", of=name, bytes=len(content))
        return content


def _written(learned: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"version": _VERSION, "learned": learned}, separators=(",", ":")).encode()


def _save_beside(directory: Path, content: bytes, _tier: Tier, _deadline_ns: int) -> None:
    replace_file(directory / FILE_NAME, content)


def _load(directory: Path) -> Mapping[str, Any]:
    """Read the file of a directory; nothing is known where it is missing or no good."""
    path = directory / FILE_NAME
    try:
        return _parse(json.loads(read_file(path, _FILE_BYTES_MAX + 1)))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.warning("what was learned before cannot be read", path=path, error=error)
        return {}


def _parse(document: Any) -> Mapping[str, Any]:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}")
    learned = document["learned"]
    if not isinstance(learned, dict):
        raise TypeError("not a document")
    return learned
