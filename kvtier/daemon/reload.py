"""Reloads the configuration of a running daemon: completely or not at all.

Theory
------
Everything is read and checked first, on a thread because a file may hang. If a changed key needs a
restart, nothing is applied, and each such key is named. Applying a configuration takes a few
assignments on the loop's thread, between two events of the node, so no request sees half of it.
Secrets are reloaded even if the rest is rejected: a rotated key must not wait until someone has
fixed an unrelated mistake.

Rules
-----
* Reloads run one at a time. All requests during a reload share the next one, which reads the files
  as they are then.
* A file that is being written is not read before it has been unchanged for a moment.
* A reload requested before the daemon serves is done then; during a stop it is ignored.
"""

import asyncio
import contextlib
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier.config import Config
from kvtier.config.toml_text import changes, document, shown
from kvtier.core.residency import SLOW_TIERS, TierName
from kvtier.daemon.tiers.opening import is_same_place
from kvtier.errors import ConfigError
from kvtier.observe.log import Log
from kvtier.runtime.worker_pool import run_in_thread

__all__ = ["Read", "Reload", "ReloadOutcome", "Reloaded"]

_log = Log("kvtier.daemon")

_READ_LIMIT_S = 5.0
"""Time limit for reading the file and the secrets, whatever device they are on."""

_SETTLED_S = 0.2
"""A file that has not changed for this long counts as complete."""

_SETTLE_LIMIT_S = 2.0

Read = Callable[[], Config | Sequence[ConfigError]]
"""Reads the configuration again from the same file, environment and options."""

_Found = tuple[Config | Sequence[ConfigError], list[str]]
"""The configuration or its errors, and the errors of secrets."""


class ReloadOutcome(StrEnum):
    """Result of a reload; a closed set."""

    APPLIED = "applied"
    UNCHANGED = "unchanged"
    """Nothing has changed."""
    REFUSED = "refused"
    """Nothing was applied."""


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Result of a reload: the changes, or the reasons why nothing was applied."""

    outcome: ReloadOutcome
    changed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    at_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "outcome": self.outcome.value,
            "changed": list(self.changed),
            "reasons": list(self.reasons),
            "at_s": self.at_s,
        }


class Reload:
    """Holds the current configuration and replaces it; ``read`` returns a new one from ``path``."""

    def __init__(
        self,
        config: Config,
        read: Read | None = None,
        *,
        path: Path | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``around`` is entered for each reload."""
        self.config = config
        self.last: Reloaded | None = None
        self.is_free: Callable[[str], bool] = lambda _key: False
        """Returns whether a key is unused at the moment and can change without a restart."""
        self.read_secrets: Callable[[], list[str]] = list
        """Reloads all other secrets, and returns their errors; called on a thread."""
        self._read = read or (lambda: self.config)
        self._path = path
        self._around = around
        self._num_done = 0
        self._reading: asyncio.Future[_Found] | None = None
        """The read in progress, which may hang; there is at most one."""
        self._adopt: Callable[[Config], None] | None = None
        self._wake: Callable[[], object] = lambda: None
        self._is_requested = False
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[Reloaded] | None = None
        self._tasks: set[asyncio.Task[Reloaded]] = set()

    def request(self) -> None:
        """Request a reload, now or once the daemon serves. From any thread or signal handler."""
        self._is_requested = True
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._wake()

    def begin(self, adopt: Callable[[Config], None]) -> None:
        """Accept reloads from now on; ``adopt`` applies a configuration on the running loop."""
        loop = asyncio.get_running_loop()
        self._adopt = adopt
        self._wake = lambda: loop.call_soon_threadsafe(self._start)
        if self._is_requested:
            self._start()

    async def end(self) -> None:
        """Accept no more reloads; one in progress applies nothing."""
        self._wake, self._adopt = (lambda: None), None
        for task in tuple(self._tasks):
            task.cancel()

    async def ask(self) -> dict[str, Any]:
        """Reload everything, and return the result as JSON values."""
        reloaded = await asyncio.shield(self._start())
        return reloaded.document()

    @property
    def is_open(self) -> bool:
        """Whether ``take_secret`` may be called: from ``begin`` to ``end``, while nothing is read.

        A reload in progress may have read the previous secret, and would bring it back.
        """
        return self._adopt is not None and not self._lock.locked()

    def take_secret(self, name: TierName, value: str, source: str) -> str:
        """Adopt a new value of a tier's secret if that needs no restart; returns why not."""
        before = self.config.tiers[name]
        after, key = before.with_secret(value), f"{name}.{before.file_backed_key}"
        if after == before:
            return ""
        read = self.config.with_tier(name, after, {key: source})
        said = self._describe(key, read)
        if not self._may_change(key, read):
            return f"{said}: needs {self._way_of(key)}"
        self._take(read)
        _log.info("configuration changed", change=said)
        return ""

    def document(self) -> dict[str, Any]:
        """Return the reload part of the status document."""
        return {
            "file": str(self._path or ""),
            "reloads": self._num_done,
            "last_reload": self.last.document() if self.last else None,
        }

    def effective(self) -> dict[str, Any]:
        """Return the current value of each key."""
        return document(self.config)

    def _start(self) -> "asyncio.Task[Reloaded]":
        """Return the next reload, which has not read anything yet."""
        self._is_requested = False
        if self._next is None:
            self._next = asyncio.create_task(self._turn())
            self._tasks.add(self._next)
            self._next.add_done_callback(self._tasks.discard)
        return self._next

    async def _turn(self) -> Reloaded:
        async with self._lock:
            self._next = None  # later requests must see later changes
            try:
                with self._around():
                    self.last = await self._once()
            except Exception as error:
                _log.exception("reload failed")
                self.last = _refused([repr(error)])
            self._num_done += 1
            return self.last

    async def _once(self) -> Reloaded:
        found = await self._found()
        if isinstance(found, str):
            return _refused([found])
        read, faults = found
        if not isinstance(read, Config):
            return _refused(map(str, read), faults)
        if self._adopt is None:
            return _refused(["the daemon is starting or stopping"], faults)
        changed = dict(changes(self.config, read))
        stuck = [
            key
            for key, is_live in changed.items()
            if not is_live and not self._may_change(key, read)
        ]
        if stuck or faults:
            reasons = [f"{self._describe(key, read)}: needs {self._way_of(key)}" for key in stuck]
            return _refused(reasons, faults)
        said = tuple(self._describe(key, read) for key in changed)
        self._take(read)
        for line in said:
            _log.info("configuration changed", change=line)
        if not said:
            _log.info("configuration reloaded, no changes")
        outcome = ReloadOutcome.APPLIED if said else ReloadOutcome.UNCHANGED
        return Reloaded(outcome, said, at_s=_now_s())

    async def _found(self) -> _Found | str:
        """Read everything; returns an error if that takes too long."""
        file = self._path or "the configuration"
        if self._reading is not None and not self._reading.done():
            return f"an earlier reload is still reading {file}"
        self._reading = run_in_thread(self._read_all, "kvtier-reload")
        await asyncio.wait({self._reading}, timeout=_READ_LIMIT_S)
        if not self._reading.done():
            return f"{file} could not be read within {_READ_LIMIT_S:.0f} s"
        return self._reading.result()

    def _may_change(self, key: str, read: Config) -> bool:
        section, _, name = key.partition(".")
        if section in SLOW_TIERS:
            tier = TierName(section)
            is_place = name == read.tiers[tier].place_key
            if is_place and is_same_place(tier, self.config, read):
                return True
        return not self._is_fixed(key) and self.is_free(key)

    def _is_fixed(self, key: str) -> bool:
        """Return whether only a restart changes a key, even while its tier is detached."""
        section, _, name = key.partition(".")
        return section in SLOW_TIERS and name in self.config.tiers[TierName(section)].fixed_keys

    def _way_of(self, key: str) -> str:
        """Return how to apply a key that is not live."""
        section = key.partition(".")[0]
        if section not in SLOW_TIERS or self._is_fixed(key):
            return "a restart"
        return f"a restart, or `kvtier tier detach {section}` first"

    def _take(self, config: Config) -> None:
        """Apply a configuration; if that fails, which is a bug, restore the previous one."""
        assert self._adopt is not None, "begin comes first"
        try:
            self._adopt(config)
        except BaseException:
            self._adopt(self.config)
            raise
        self.config = config

    def _describe(self, key: str, read: Config) -> str:
        before, after = shown(key, self.config), shown(key, read)
        change = f"{before} to {after}" if before != after else f"{after}, another login"
        return f"{key}: {change} ({read.source_of(key)})"

    # On a thread

    def _read_all(self) -> _Found:
        faults = self.read_secrets()
        fault = None if self._path is None else _await_complete(self._path)
        return ([fault] if fault else self._read()), faults


def _await_complete(path: Path) -> ConfigError | None:
    """Wait until a file has not changed for a moment; returns an error if that never happens."""
    until_s = time.monotonic() + _SETTLE_LIMIT_S
    while time.monotonic() < until_s:
        try:
            found = path.stat()
        except OSError:
            return None  # reading it will report the error
        if not stat.S_ISREG(found.st_mode):  # a pipe cannot be read twice
            return ConfigError(str(path), "is not a regular file", "restart instead")
        age_s = time.time() - found.st_mtime
        if not 0 <= age_s < _SETTLED_S:
            return None
        time.sleep(_SETTLED_S - age_s)
    return ConfigError(str(path), "is being written all the time", "replace it in one step")


def _refused(reasons: Iterable[str], faults: Iterable[str] = ()) -> Reloaded:
    """Log why nothing is applied; errors of secrets have been logged already."""
    told = tuple(reasons)
    for reason in told:
        _log.error("configuration rejected, nothing applied", reason=reason)
    return Reloaded(ReloadOutcome.REFUSED, reasons=(*told, *faults), at_s=_now_s())


def _now_s() -> float:
    return round(time.time(), 3)
