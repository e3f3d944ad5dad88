"""Build sdist and wheel, and test them in a clean environment; ``make wheel`` runs this.

    python scripts/check_dist.py build otel redis

Builds sdist and wheel below ``build``, compares the wheel with one built from the sdist, installs
it into a new environment, runs a daemon there, and lets pip resolve the named extras.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from kvtier.testing.child import free_port

_ROOT = Path(__file__).resolve().parent.parent
_EXTRAS_ONLY = ("cupy", "hiredis", "opentelemetry", "redis", "torch", "transformers", "vllm")
_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


def main(folder: Path, extras: list[str]) -> None:
    """Run all steps; the first failure ends with a traceback."""
    for name in ("dist", "again", "clean"):
        shutil.rmtree(folder / name, ignore_errors=True)
    _python("-m", "hatchling", "build", "--directory", str((folder / "dist").absolute()))
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder / "again"))
    _python("-m", "pip", "wheel", *options, str(sdist))
    (again,) = (folder / "again").glob("*.whl")
    assert _contents(wheel) == _contents(again), "the sdist gives another wheel"
    clean = folder / "clean" / "bin"
    _python("-m", "venv", str(clean.parent))
    _pip(clean, "--constraint", str(_ROOT / "constraints.txt"), str(wheel))
    subprocess.run([clean / "python", "-m", "pip", "check"], check=True)
    packages = next(clean.parent.glob("lib/python*/site-packages"))
    unwanted = [name for name in _EXTRAS_ONLY if (packages / name).exists()]
    assert not unwanted, f"the daemon alone brings {', '.join(unwanted)}"
    _serve(clean / "kvtier")
    _pip(clean, "--dry-run", f"{wheel}[{','.join(extras)}]")
    print(f"{wheel.name} and {sdist.name} are good")


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, cwd=_ROOT)


def _pip(clean: Path, *arguments: str) -> None:
    # Uses this environment's pip: the one that comes with Python is slower by minutes.
    pip = ("-m", "pip", "--python", str(clean / "python"), "install", "--quiet")
    _python(*pip, *arguments)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def _serve(program: Path) -> None:
    """Start a daemon of that environment in a new directory until it is ready, and stop it."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvtier-") as home:
        settings = {
            "daemon.socket": f"{home}/k.sock",
            "cpu.capacity": "64MiB",
            "ssd.directory": f"{home}/ssd",
            "ssd.capacity": "1GiB",
            "ssd.free_space_floor": "0",
            "http.listen": f"127.0.0.1:{port}",
        }
        words = [word for item in settings.items() for word in ("--set", "=".join(item))]
        # Elsewhere, because `import kvtier` would find the checkout here.
        daemon = subprocess.Popen([program.absolute(), "serve", *words], cwd=home, env=_bare())
        try:
            _await_ready(daemon, port)
            daemon.terminate()
            assert daemon.wait(_STOP_TIMEOUT_S) == 0
        finally:
            daemon.kill()


def _bare() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _await_ready(daemon: "subprocess.Popen[bytes]", port: int) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while True:
        assert daemon.poll() is None, "the daemon ended"
        assert time.monotonic() < deadline_s, "the daemon is not ready"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5).close()
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
