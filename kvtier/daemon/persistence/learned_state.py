"""What was learned of tiers, engines and traffic, kept beside the SSD's blocks across restarts.

It holds speeds, counts and the words that clients have for kinds of requests, but no hashes,
tenants or text.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvtier.daemon.persistence.saved_document import FILE_BYTES_MAX, SavedDocument
from kvtier.observe.log import Log
from kvtier.runtime.driver import Driver
from kvtier.runtime.worker_pool import run_in_thread

__all__ = ["FILE_NAME", "LearnedState", "Learner"]

_log = Log("kvtier.daemon")

FILE_NAME = "learned.json"

_VERSION = 1


class Learner(Protocol):
    """A model that learns while it runs."""

    def document(self) -> Mapping[str, Any]:
        """Return what was learned; all of it can be written as JSON."""

    def recall(self, document: Mapping[str, Any]) -> str | None:
        """Take what an earlier run learned, or say why it makes no sense; it is ignored then."""


class LearnedState:
    """Keeps what ``learners`` know in ``directory``, where there is one; ``recall`` first.

    Those that matter most come first: where there is no room for all, the last are left out. On the
    loop's thread.
    """

    def __init__(
        self, driver: Driver, learners: Mapping[str, Learner], directory: Path | None
    ) -> None:
        self._learners = learners
        self._blank = {name: learner.document() for name, learner in learners.items()}
        self._file = SavedDocument(
            driver, directory, name=FILE_NAME, version=_VERSION, what="what was learned"
        )

    async def move_to(self, directory: Path) -> None:
        """Keep it there from now on, and tell those what is there who have learned nothing yet.

        What others have learned while they ran is newer, and goes in its place.
        """
        read = partial(self._file.read_in, directory, _parse)
        known = await run_in_thread(read, "kvtier-load") or {}  # before a save writes over it
        self._file.move_to(directory)
        names = sorted(known.keys() & self._learners.keys())
        taken = [name for name in names if self._learners[name].document() == self._blank[name]]
        self._tell({name: known[name] for name in taken})
        if names:
            _log.info(
                "what was learned on this disk before is taken up where this run knows nothing",
                of=" ".join(taken),
                not_of=" ".join(name for name in names if name not in taken),
            )

    def recall(self) -> None:
        """Tell the learners what the last run has kept."""
        self._tell(self._file.read(_parse) or {})

    def _tell(self, known: Mapping[str, Any]) -> None:
        for name, document in known.items():
            if name not in self._learners or not isinstance(document, dict):
                continue
            if fault := self._learners[name].recall(document):
                _log.warning("what was learned before makes no sense", of=name, error=fault)

    async def save(self) -> None:
        """Keep what is known now, where that has changed."""
        await self._file.save(self._content())

    def _content(self) -> bytes:
        learned = {name: each.document() for name, each in self._learners.items()}
        while len(content := _written(learned)) > FILE_BYTES_MAX:
            name, _ = learned.popitem()
            _log.warning("what was learned is too long to be kept", of=name, bytes=len(content))
        return content


def _written(learned: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"version": _VERSION, "learned": learned}, separators=(",", ":")).encode()


def _parse(document: Any) -> Mapping[str, Any]:
    learned = document["learned"]
    if not isinstance(learned, dict):
        raise TypeError("not a document")
    return learned
