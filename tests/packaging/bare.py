"""An environment with what ``pip install kvtier`` brings, and nothing else."""

import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["bare_python"]


def bare_python(folder: Path) -> Path:
    """Make one at ``folder`` of what is installed here, without a registry; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "kvtier").symlink_to(ROOT / "kvtier")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in _needed(project["dependencies"], set()):
        for name in {path.parts[0] for path in needed.files or () if path.parts[0] != ".."}:
            # Some packages share a folder.
            if name != "__pycache__" and not (packages / name).exists():
                (packages / name).symlink_to(Path(str(needed.locate_file(name))))
    return folder / "bin" / "python"


def _needed(requirements: Iterable[str], seen: set[str]) -> Iterator[Distribution]:
    """Yield what is required without any extra, and what that requires in turn."""
    for each in map(Requirement, requirements):
        if each.name in seen or (each.marker and not each.marker.evaluate({"extra": ""})):
            continue
        seen.add(each.name)
        yield distribution(each.name)
        yield from _needed(distribution(each.name).requires or (), seen)
