"""Saves the state learned about tiers, engines and traffic across restarts.

It contains speeds, counts and the clients' names for kinds of requests, but no hashes, tenants or
text.
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
    """A component with state that is learned while it runs."""

    def document(self) -> Mapping[str, Any]:
        """Return the learned state as JSON values."""

    def recall(self, document: Mapping[str, Any]) -> str | None:
        """Restore the state of an earlier run; returns why it is invalid and was ignored."""


class LearnedState:
    """Saves the state of ``learners`` in ``directory``, if there is one; call ``recall`` first.

    The most important ones come first: if the file would be too long, the last ones are left out.
    For the loop's thread.
    """

    def __init__(
        self, driver: Driver, learners: Mapping[str, Learner], directory: Path | None
    ) -> None:
        self._learners = learners
        self._blank = {name: learner.document() for name, learner in learners.items()}
        self._file = SavedDocument(
            driver, directory, name=FILE_NAME, version=_VERSION, what="learned state"
        )

    async def move_to(self, directory: Path) -> None:
        """Save to another directory, and restore the state there for learners that have none.

        The others have learned newer state in this run, which replaces the saved one.
        """
        read = partial(self._file.read_in, directory, _parse)
        known = await run_in_thread(read, "kvtier-load") or {}  # before a save overwrites it
        self._file.move_to(directory)
        names = sorted(known.keys() & self._learners.keys())
        taken = [name for name in names if self._learners[name].document() == self._blank[name]]
        self._restore({name: known[name] for name in taken})
        if names:
            _log.info(
                "restored learned state from the attached directory",
                of=" ".join(taken),
                not_of=" ".join(name for name in names if name not in taken),
            )

    def recall(self) -> None:
        """Restore the state of the last run."""
        self._restore(self._file.read(_parse) or {})

    def _restore(self, known: Mapping[str, Any]) -> None:
        for name, document in known.items():
            if name not in self._learners or not isinstance(document, dict):
                continue
            if fault := self._learners[name].recall(document):
                _log.warning("invalid learned state ignored", of=name, error=fault)

    async def save(self) -> None:
        """Save the state if it has changed."""
        await self._file.save(self._content())

    def _content(self) -> bytes:
        learned = {name: each.document() for name, each in self._learners.items()}
        while len(content := _written(learned)) > FILE_BYTES_MAX:
            name, _ = learned.popitem()
            _log.warning("learned state too long, not saved", of=name, bytes=len(content))
        return content


def _written(learned: Mapping[str, Mapping[str, Any]]) -> bytes:
    return json.dumps({"version": _VERSION, "learned": learned}, separators=(",", ":")).encode()


def _parse(document: Any) -> Mapping[str, Any]:
    learned = document["learned"]
    if not isinstance(learned, dict):
        raise TypeError("not a document")
    return learned
