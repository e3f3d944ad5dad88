"""What an adapter is, by the content of its folder: its name, its path and its number do not count.

Rules
-----
* No call waits: files are read on a thread, and a request is asked after until its answer is there.
* Each request has the files looked at anew, since vLLM reads an adapter that it has put away again
  from its folder: what has changed since vLLM began, it may have or not.
* A name or a number that has meant two adapters stands for neither: vLLM may have loaded one and
  kept blocks of the other, which older releases know by the adapter's name alone.
* What cannot be known leaves requests uncached, and is said once for each adapter.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.connectors.kit.threads import Threads
from kvtier.connectors.kit.weights import FileDigests, fingerprint
from kvtier.observe.log import Log

__all__ = ["AdapterFingerprints"]

_log = Log("kvtier.vllm")

_WAIT_S = 0.25
"""As long as a request waits for its answer; a file that is read for longer helps the next one."""

_ADAPTERS_MAX = 1024
"""That many are remembered by number and name; vLLM has some hundreds in use."""

_WAITING_MAX = 256
"""Reached where a file system hangs: requests after that are uncached at once."""

_FILES_MAX = 64
_KINDS = ("adapter_config.json", "*.safetensors", "*.bin", "*.pt")


class _Asked(NamedTuple):
    answer: Future[bytes]
    began_s: float


class AdapterFingerprints:
    """Asked once about each request that has an adapter; ``since_ns`` is when vLLM began."""

    def __init__(
        self, digests: FileDigests, since_ns: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._digests = digests
        self._since_ns = since_ns
        self._clock = clock
        self._asked: dict[str, _Asked] = {}
        self._paths: dict[int | str, str] = {}
        """By number and by name; empty for those that do not tell which adapter is meant."""
        self._refused: set[str] = set()
        self._reader = Threads(_log, "kvtier-adapter", 1, _WAITING_MAX)

    def note(self, adapter: Any) -> str:
        """Hear that vLLM uses an adapter, and return why it cannot be known; empty where it can.

        Wanted for each request, also for those that nobody asks about: their blocks stay in vLLM's
        own cache, under the adapter's name.
        """
        doubt = _strangeness(adapter)
        path = "" if doubt else adapter.lora_path
        names = (adapter.lora_int_id, adapter.lora_name)
        is_same = all(self._paths.get(name, path) == path for name in names)
        is_full = len(self._paths) >= 2 * _ADAPTERS_MAX
        for name in names:
            if name in self._paths or not is_full:
                self._paths[name] = path if is_same else ""
        if not is_same:
            return doubt or "its number or name was another one's, and vLLM may have either"
        if any(name not in self._paths for name in names):
            return doubt or f"it is one of more than {_ADAPTERS_MAX}"
        return doubt

    def ask(self, request: Any) -> None:
        """Begin to find out which adapter a request has."""
        doubt = self.note(request.lora_request)
        answer: Future[bytes] = Future()
        if self._reader.submit(self._find, answer, request.lora_request, doubt):
            self._asked[request.request_id] = _Asked(answer, self._clock())

    def is_open(self, request_id: str) -> bool:
        """Tell whether the answer about a request is still to come, and worth to wait for."""
        asked = self._asked.get(request_id)
        if asked is None or asked.answer.done():
            return False
        return self._clock() < asked.began_s + _WAIT_S

    def take(self, request_id: str) -> bytes | None:
        """Take the answer about a request: what stands for its adapter, None if that is unknown."""
        asked = self._asked.pop(request_id, None)
        if asked is None or not asked.answer.done():
            return None
        return None if asked.answer.exception() else asked.answer.result()

    def forget(self, request_id: str) -> None:
        """Hear that a request is over."""
        self._asked.pop(request_id, None)

    def close(self) -> None:
        """End; what is read just now is read to its end, if the digests are not ended before."""
        self._reader.close(0)

    def _find(self, answer: Future[bytes], adapter: Any, doubt: str) -> None:
        try:
            answer.set_result(self._content(adapter, doubt))
        except Exception as error:
            answer.set_exception(error)
            if adapter.lora_name not in self._refused and len(self._refused) < _ADAPTERS_MAX:
                self._refused.add(adapter.lora_name)
                _log.warning("an adapter is not cached", adapter=adapter.lora_name, reason=error)

    def _content(self, adapter: Any, doubt: str) -> bytes:
        if doubt:
            raise ValueError(doubt)
        files = _files(Path(adapter.lora_path))
        digest = fingerprint("adapter", files, self._since_ns, self._digests)
        # vLLM reads the weights of experts one way or the other, as the request says.
        is_fused = bool(getattr(adapter, "is_3d_lora_weight", False))
        return digest + json.dumps({"is_fused": is_fused}).encode()


def _strangeness(adapter: Any) -> str:
    """Return why what an adapter computes does not follow from the files of its folder."""
    if type(adapter).__name__ != "LoRARequest":
        return f"{type(adapter).__name__} may carry weights of its own"
    if getattr(adapter, "tensorizer_config_dict", None):
        return "its weights are a tensorizer's"
    return ""


def _files(folder: Path) -> list[Path]:
    """Return the files of an adapter that vLLM may read."""
    folder = Path(os.path.expanduser(folder))
    files = list(_matching(folder))
    if not (folder / _KINDS[0]).is_file() or len(files) < 2:
        raise ValueError(f"{folder} is no folder of an adapter on this machine")
    if len(files) > _FILES_MAX:
        raise ValueError(f"{folder} has more than {_FILES_MAX} files")
    return files


def _matching(folder: Path) -> Iterator[Path]:
    for kind in _KINDS:
        yield from sorted(folder.glob(kind))
