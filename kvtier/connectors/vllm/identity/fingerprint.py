"""The fingerprint of a model's weights, taken on a thread: until it is there, all is uncached."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kvtier.config.tiers import default_cache_directory
from kvtier.connectors.vllm.identity.weights import FileDigests, fingerprint, model_files
from kvtier.observe.log import Log

__all__ = ["Fingerprint", "began_ns", "record_path"]

_log = Log("kvtier.vllm")

_NEWS_S = 10.0
"""A model that is read for longer is said to be read, and how far."""


class Fingerprint:
    """Begins with ``start``. ``since_ns`` is when vLLM began, which reads the files after that."""

    def __init__(self, find_model: Callable[[], Path], since_ns: int, digests: FileDigests) -> None:
        """``find_model`` is called on the thread; it may raise OSError or ValueError."""
        self._find_model = find_model
        self._since_ns = since_ns
        self._digests = digests
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._told_s = self._began_s = time.monotonic()
        self.weights = b""
        """What stands for the weights, once it is known."""
        self.refusal = ""
        """Why it will not be known."""

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, name="kvtier-weights", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is known, or known that it will not be; False if that is not in time."""
        return self._is_over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.weights = self._take()
        except (OSError, ValueError) as error:
            self.refusal = str(error)
        except Exception as error:
            _log.exception("the weights cannot be told")
            self.refusal = f"the weights cannot be told: {error}"
        finally:
            self._is_over.set()

    def _take(self) -> bytes:
        files = model_files(self._find_model())
        total_bytes = sum(path.stat().st_size for path in files)
        taken = fingerprint(
            "weights", files, self._since_ns, self._digests, lambda n: self._note(n, total_bytes)
        )
        seconds = time.monotonic() - self._began_s
        if seconds > _NEWS_S:
            _log.info("the weights are known", bytes=total_bytes, seconds=round(seconds, 1))
        return taken

    def _note(self, num_bytes: int, total_bytes: int) -> None:
        """Count what was read, and say from time to time how far that is."""
        with self._lock:
            self._read_bytes += num_bytes
            now_s = time.monotonic()
            if now_s < self._told_s + _NEWS_S:
                return
            self._told_s, read_bytes = now_s, self._read_bytes
        _log.info("reading the weights", read_bytes=read_bytes, total_bytes=total_bytes)


def began_ns() -> int:
    """Return when this process began, which is before it, or a child of it, read any weights."""
    return int(psutil.Process().create_time() * 1e9)


def record_path() -> Path | None:
    """Return where digests of large files are kept; None for a user without a home."""
    try:
        return default_cache_directory().parent / "kvtier-vllm" / "weights.json"
    except RuntimeError:
        return None
