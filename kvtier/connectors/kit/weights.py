"""Fingerprints weights by the content of their files, for a model or an adapter.

Theory
------
An engine reads the files some time after it started and does not report what it read. So a file
identifies what the engine has only if it has not changed since the start. The inode's change time
shows that, since no program can set it. A file that the hub's cache stores under the digest of its
content may be newer, because this very start may have fetched it; it counts as long as its content
still has that digest. The name alone is not trusted: programs write through the links of a
snapshot, and nothing verifies a download.

Reading a hundred gigabytes takes minutes, so digests of large files are saved in a record. The key
of an entry identifies one state of a file: inode, size, times and both ends of the content.
"""

import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from kvtier.config.tiers import default_cache_directory
from kvtier.observe.log import Log

__all__ = [
    "FileDigests",
    "WeightsFingerprint",
    "began_ns",
    "fingerprint",
    "hub_snapshot",
    "model_files",
    "record_path",
]

_CHUNK_BYTES = 1 << 20
_EDGE_BYTES = 64 << 10
"""A safetensors file begins with its table of contents; its end differs after more training."""

_RECORDED_BYTES_MIN = 16 << 20
"""Smaller files are read again by each process, which takes a few hundredths of a second."""

_RECORD_ENTRIES_MAX = 4096
_RECORD_BYTES_MAX = 4 << 20
_MEMORY_ENTRIES_MAX = 4096

_NUM_READERS = 4
"""One thread reads and hashes about 1 GB/s; disks can serve several."""

_WEIGHTS = (".safetensors", ".bin", ".pt")
_BESIDE = (".json", ".py")
"""Files beside the weights that count: tables of contents, quantization, image preprocessing, and
code shipped with the model."""

_NO_PART = re.compile(r"\..*|original|checkpoint-[0-9]+")
"""Subdirectories that no engine reads: those of git and of the hub, the same weights in another
format (which vLLM does not download either), and training checkpoints."""

_FOLDERS_MAX = 256
_FILES_MAX = 4096
"""The largest models have a few hundred files, and few directories."""

_IRRELEVANT = frozenset(
    {
        "added_tokens.json",
        "chat_template.json",
        "config.json",  # the engine's own configuration counts, with overrides
        "generation_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }
)
"""Tokenization and generation settings: blocks are identified by their tokens."""


class FileDigests:
    """SHA-256 of files; each state of a file is read once. May be used from any thread."""

    def __init__(self, record: Path | None = None) -> None:
        """Digests of large files are saved in ``record``; an unusable record is ignored."""
        self._record = record
        self._known: dict[str, str] | None = None
        self._lock = threading.Lock()
        self._is_ending = threading.Event()

    def end(self) -> None:
        """Make all reading end with an OSError soon."""
        self._is_ending.set()

    def digest(self, path: Path, on_read: Callable[[int], None] = lambda _: None) -> str:
        """Return the digest of a regular file; ``on_read`` gets the number of bytes of each read.

        Raises OSError if it cannot be read, ValueError if it changes meanwhile or is not regular.
        """
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ValueError(f"{path} is not a regular file")
        with path.open("rb", buffering=0) as content:
            state = _state(content)
            known = self._recorded().get(state)
            size_bytes = os.fstat(content.fileno()).st_size
            if known is not None:
                on_read(size_bytes)
                return known
            digest = self._read(content, on_read)
            if _state(content) != state:
                raise ValueError(f"{path} changed while it was read")
        self._keep(state, digest, size_bytes >= _RECORDED_BYTES_MIN)
        return digest

    def _read(self, content: BinaryIO, on_read: Callable[[int], None]) -> str:
        content.seek(0)
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
        while length := content.readinto(buffer):  # type: ignore[attr-defined]  # BinaryIO lacks it
            if self._is_ending.is_set():
                raise OSError("the engine is shutting down")
            sha256.update(buffer[:length])
            on_read(length)
        return sha256.hexdigest()

    def _recorded(self) -> dict[str, str]:
        """Return the known digests; the first caller reads the record, on its own thread."""
        with self._lock:
            if self._known is None:
                self._known = _read_record(self._record) if self._record else {}
            return self._known

    def _keep(self, state: str, digest: str, is_large: bool) -> None:
        known = self._recorded()
        with self._lock:
            if len(known) >= _MEMORY_ENTRIES_MAX:
                known.pop(next(iter(known)))
            known[state] = digest
            if is_large and self._record is not None:
                _add_to_record(self._record, state, digest)


def fingerprint(
    kind: str,
    files: Sequence[Path],
    since_ns: int,
    digests: FileDigests,
    on_read: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Return 32 bytes that identify the content of files, wherever they are stored.

    Raises ValueError, naming the file, if the engine, which started at ``since_ns``, may have read
    other content, and OSError if a file cannot be read.
    """
    found = _in_parallel(files, lambda path: digests.digest(path, on_read))
    for path, digest in zip(files, found, strict=True):
        moved_ns = max(_link_changed_ns(path.parent), _changed_ns(path, digest))
        if moved_ns >= since_ns:
            raise ValueError(f"{path} has changed since the engine started")
    folder = os.path.commonpath([path.parent for path in files])
    names = [path.relative_to(folder).as_posix() for path in files]
    named = sorted(zip(names, found, strict=True))
    # The prefix is part of stored identities: do not change it.
    return hashlib.sha256(f"kvtier.vllm.{kind}\0{json.dumps(named)}".encode()).digest()


def model_files(model: Path) -> list[Path]:
    """Return the files that determine what a model computes. Raises ValueError without weights.

    Weights in every format count, since an option of the engine decides which are read, and so do
    subdirectories, where some models store the weights of a part.
    """
    if model.is_file():
        return [model]
    files: list[Path] = []
    for count, folder in enumerate(_folders(model), 1):
        files += [path for path in sorted(folder.iterdir()) if _counts(path, folder == model)]
        if count > _FOLDERS_MAX or len(files) > _FILES_MAX:
            raise ValueError(
                f"{model} has more than {_FOLDERS_MAX} directories or {_FILES_MAX} files"
            )
    if not any(path.suffix in _WEIGHTS and path.parent == model for path in files):
        raise ValueError(f"{model} has no weight files (*{', *'.join(_WEIGHTS)})")
    return files


def hub_snapshot(name: str, revision: str | None, cache: str | None, since_ns: int) -> Path:
    """Return the directory in the hub's cache that the engine has read a model from.

    Raises OSError if there is none, and ValueError if the cache has several and the name has
    referred to another one since the engine started.
    """
    from huggingface_hub import snapshot_download  # installed with the engine, not with kvtier

    found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    folder = Path(found)
    reference = folder.parents[1] / "refs" / (revision or "main")
    is_one_of_many = len(list(folder.parent.iterdir())) > 1
    if is_one_of_many and reference.exists() and reference.stat().st_ctime_ns >= since_ns:
        raise ValueError(f"{reference} has changed since the engine started")
    return folder


def _folders(folder: Path, above: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """Yield a directory and all below it, following links as engines do, but not in a circle."""
    place = folder.resolve()
    if place in above:
        return
    yield folder
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not _NO_PART.fullmatch(path.name):
            yield from _folders(path, above | {place})


def _counts(path: Path, is_on_top: bool) -> bool:
    if path.suffix in _BESIDE:
        return not (is_on_top and path.name in _IRRELEVANT) and not path.is_dir()
    return path.suffix in _WEIGHTS and not path.is_dir()


def _link_changed_ns(folder: Path) -> int:
    """Return when the newest symbolic link on the path to a directory was created."""
    absolute = Path(os.path.abspath(folder))  # keeps the links, which resolve() would follow
    links = [path for path in (absolute, *absolute.parents) if path.is_symlink()]
    return max((path.lstat().st_ctime_ns for path in links), default=0)


def _changed_ns(path: Path, digest: str) -> int:
    """Return when a file or its directory last changed; 0 if its name is its content's digest."""
    if _is_named_by_content(path, digest):
        return 0
    states = (path.stat(), path.lstat(), path.parent.stat())
    return max(state.st_ctime_ns for state in states)


def _is_named_by_content(path: Path, digest: str) -> bool:
    """Return whether the hub's cache stores a file under the digest of its content."""
    target = path.resolve()
    if target.parent.name != "blobs":
        return False
    if len(target.name) == len(digest):
        return target.name == digest
    content = target.read_bytes()  # small files are named by git's digest
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return target.name == git.hexdigest()


def _state(content: BinaryIO) -> str:
    """Return what identifies this state of an open file."""
    status = os.fstat(content.fileno())
    content.seek(0)
    edges = content.read(_EDGE_BYTES)
    content.seek(max(0, status.st_size - _EDGE_BYTES))
    edges += content.read(_EDGE_BYTES)
    numbers = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, numbers)) + ":" + hashlib.sha256(edges).hexdigest()[:32]


def _in_parallel(paths: Sequence[Path], work: Callable[[Path], str]) -> list[str]:
    """Return ``work(path)`` for each path, on threads that the engine's exit does not wait for."""
    futures: list[Future[str]] = [Future() for _ in paths]
    left = iter(zip(paths, futures, strict=True))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                path, future = next(left, (None, None))
            if path is None or future is None:
                return
            try:
                future.set_result(work(path))
            except Exception as error:
                future.set_exception(error)

    for _ in range(min(_NUM_READERS, len(paths))):
        threading.Thread(target=run, name="kvtier-digest", daemon=True).start()
    return [future.result() for future in futures]


def _read_record(path: Path) -> dict[str, str]:
    """Return a record's content if only this user can write it and it is valid; else nothing."""
    try:
        status = path.stat()
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.geteuid()
            or status.st_mode & 0o022
        ):
            return {}
        with path.open("rb") as file:
            known = json.loads(file.read(_RECORD_BYTES_MAX + 1))
    except (OSError, ValueError, RecursionError):
        return {}
    return {
        state: digest
        for state, digest in (known.items() if isinstance(known, dict) else ())
        if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)
    }


def _add_to_record(path: Path, state: str, digest: str) -> None:
    """Add a digest to a record atomically. If that fails, the file is read again next time."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = _last(_read_record(path).items(), _RECORD_ENTRIES_MAX - 1)
        new.write_text(json.dumps(dict(kept) | {state: digest}, indent=0))
        new.chmod(0o600)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()


def _last(items: Iterable[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    return list(items)[-count:]


_log = Log("kvtier.connector")

_PROGRESS_S = 10.0
"""Reading a model for longer is logged with its progress."""


class WeightsFingerprint:
    """Fingerprints a model's weights on a thread; until it is done nothing can be cached.

    ``since_ns`` is when the engine started, which reads the files after that.
    """

    def __init__(self, find_model: Callable[[], Path], since_ns: int, digests: FileDigests) -> None:
        """``find_model`` runs on the thread; it may raise OSError or ValueError."""
        self._find_model = find_model
        self._since_ns = since_ns
        self._digests = digests
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._logged_s = self._began_s = time.monotonic()
        self.weights = b""
        """The fingerprint, 32 bytes, once it is known."""
        self.refusal = ""
        """Why there will be no fingerprint."""

    def start(self) -> None:
        """Start reading."""
        threading.Thread(target=self._run, name="kvtier-weights", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for a fingerprint or a refusal; returns False on timeout."""
        return self._is_over.wait(timeout_s)

    def _run(self) -> None:
        try:
            self.weights = self._take()
        except (OSError, ValueError) as error:
            self.refusal = str(error)
        except Exception as error:
            _log.exception("cannot fingerprint the weights")
            self.refusal = f"cannot fingerprint the weights: {error}"
        finally:
            self._is_over.set()

    def _take(self) -> bytes:
        files = model_files(self._find_model())
        total_bytes = sum(path.stat().st_size for path in files)
        taken = fingerprint(
            "weights", files, self._since_ns, self._digests, lambda n: self._note(n, total_bytes)
        )
        seconds = time.monotonic() - self._began_s
        if seconds > _PROGRESS_S:
            _log.info("the weights are known", bytes=total_bytes, seconds=round(seconds, 1))
        return taken

    def _note(self, num_bytes: int, total_bytes: int) -> None:
        """Count bytes read, and log the progress from time to time."""
        with self._lock:
            self._read_bytes += num_bytes
            now_s = time.monotonic()
            if now_s < self._logged_s + _PROGRESS_S:
                return
            self._logged_s, read_bytes = now_s, self._read_bytes
        _log.info("reading the weights", read_bytes=read_bytes, total_bytes=total_bytes)


def began_ns() -> int:
    """Return when this process started, before it or its children read any weights."""
    return int(psutil.Process().create_time() * 1e9)


def record_path() -> Path | None:
    """Return where digests of large files are saved; None for a user without a home directory."""
    try:
        return default_cache_directory().parent / "kvtier-vllm" / "weights.json"
    except RuntimeError:
        return None
