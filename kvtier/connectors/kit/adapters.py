"""Fingerprints LoRA adapters by the content of their files; name, path and number do not count.

Rules
-----
* No call waits: files are read on a thread, and the caller polls for a request's answer.
* The files are checked again for each request, since an engine that has unloaded an adapter reads
  it from its directory again. If it has changed since the engine started, the engine may have
  loaded either content.
* A name or number that has meant two adapters identifies neither: the engine may have loaded one
  and kept blocks of the other, which older vLLM releases identify by the adapter's name alone.
* If an adapter cannot be fingerprinted, its requests are not cached; this is logged once each.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvtier.connectors.kit.guard import Threads
from kvtier.connectors.kit.weights import FileDigests, fingerprint
from kvtier.observe.log import Log

__all__ = ["Adapter", "AdapterFingerprints"]

_log = Log("kvtier.connector")

_WAIT_S = 0.25
"""How long a request waits for its answer; a file that takes longer helps the next request."""

_ADAPTERS_MAX = 1024
"""Limit of adapters tracked by number and name; engines use a few hundred."""

_WAITING_MAX = 256
"""Requests whose answer is pending. If a file system hangs, later requests are not cached."""

_FILES_MAX = 64
_KINDS = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as a request names it."""

    number: int
    name: str
    path: str
    settings: Mapping[str, object]
    """How the engine reads the files, as JSON values; part of the fingerprint."""
    doubt: str = ""
    """Why the files do not determine what the adapter computes; empty if they do."""


class _Pending(NamedTuple):
    answer: Future[bytes]
    began_s: float


class AdapterFingerprints:
    """Fingerprints the adapter of each request; ``since_ns`` is when the engine started."""

    def __init__(
        self, digests: FileDigests, since_ns: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._digests = digests
        self._since_ns = since_ns
        self._clock = clock
        self._pending: dict[str, _Pending] = {}
        self._paths: dict[int | str, str] = {}
        """Path by number and by name; empty if the number or name is ambiguous."""
        self._refused: set[str] = set()
        self._reader = Threads(_log, "kvtier-adapter", 1, _WAITING_MAX)

    def note(self, adapter: Adapter) -> str:
        """Record that the engine uses an adapter; returns why it cannot be identified, or "".

        Call it for every request, even for those that are not cached: their blocks stay in the
        engine's own cache, under the adapter's name.
        """
        path = "" if adapter.doubt else adapter.path
        names = (adapter.number, adapter.name)
        is_same = all(self._paths.get(name, path) == path for name in names)
        is_full = len(self._paths) >= 2 * _ADAPTERS_MAX
        for name in names:
            if name in self._paths or not is_full:
                self._paths[name] = path if is_same else ""
        if adapter.doubt:
            return adapter.doubt
        if not is_same:
            return "its number or name belonged to another adapter, and either may be loaded"
        if any(name not in self._paths for name in names):
            return f"more than {_ADAPTERS_MAX} adapters were used"
        return ""

    def ask(self, request_id: str, adapter: Adapter) -> None:
        """Start fingerprinting the adapter of a request."""
        doubt = self.note(adapter)
        answer: Future[bytes] = Future()
        if self._reader.submit(self._find, answer, adapter, doubt):
            self._pending[request_id] = _Pending(answer, self._clock())

    def is_pending(self, request_id: str) -> bool:
        """Return whether the answer for a request is outstanding and still worth waiting for."""
        pending = self._pending.get(request_id)
        if pending is None or pending.answer.done():
            return False
        return self._clock() < pending.began_s + _WAIT_S

    def take(self, request_id: str) -> bytes | None:
        """Take the fingerprint of a request's adapter; None if it is unknown."""
        pending = self._pending.pop(request_id, None)
        if pending is None or not pending.answer.done():
            return None
        return None if pending.answer.exception() else pending.answer.result()

    def forget(self, request_id: str) -> None:
        """Drop the answer of a finished request."""
        self._pending.pop(request_id, None)

    def close(self) -> None:
        """Stop; a file being read is read to its end unless the digests are ended first."""
        self._reader.close(0)

    def _find(self, answer: Future[bytes], adapter: Adapter, doubt: str) -> None:
        try:
            answer.set_result(self._fingerprint(adapter, doubt))
        except Exception as error:
            answer.set_exception(error)
            if adapter.name not in self._refused and len(self._refused) < _ADAPTERS_MAX:
                self._refused.add(adapter.name)
                _log.warning("an adapter is not cached", adapter=adapter.name, reason=error)

    def _fingerprint(self, adapter: Adapter, doubt: str) -> bytes:
        if doubt:
            raise ValueError(doubt)
        digest = fingerprint("adapter", _files(Path(adapter.path)), self._since_ns, self._digests)
        return digest + json.dumps(adapter.settings).encode()


def _files(folder: Path) -> list[Path]:
    """Return the files of an adapter that an engine may read."""
    folder = Path(os.path.expanduser(folder))
    files = list(_matching(folder))
    if not (folder / _KINDS[0]).is_file() or len(files) < 2:
        raise ValueError(f"{folder} is not an adapter directory on this machine")
    if len(files) > _FILES_MAX:
        raise ValueError(f"{folder} has more than {_FILES_MAX} files")
    return files


def _matching(folder: Path) -> Iterator[Path]:
    for kind in _KINDS:
        yield from sorted(folder.glob(kind))
