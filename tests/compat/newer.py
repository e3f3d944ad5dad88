"""A newer kvtier: a copy of the package with its version numbers raised and unknown words in it.

It is a real one, started as a process of its own, so that what is tested is what two releases do
with each other. Only the numbers and the added field are made up.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

SPEAKS = {
    "wire/convert.py": {"PROTOCOL = 3": "PROTOCOL = 4"},
    "v1/operator_pb2_grpc.py": {" +'/kvtier.v1.Operator/Probe',": "'/kvtier.v1.Operator/Later',"},
}
"""A newer protocol beside the present one, and a call that is new; what it keeps is unchanged."""

KEEPS = SPEAKS | {
    "tiers/ssd/segment.py": {"_FORMAT_VERSION = 2": "_FORMAT_VERSION = 3"},
    "daemon/persistence/learned_state.py": {"_VERSION = 1": "_VERSION = 2"},
    "daemon/persistence/key_spaces.py": {"_VERSION = 1": "_VERSION = 2"},
}
"""Everything that it keeps has a newer format as well."""


def newer_kvtier(directory: Path, changes: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Write one into ``directory``; returns the environment in which its processes run."""
    package = directory / "kvtier"
    shutil.copytree(ROOT / "kvtier", package, ignore=shutil.ignore_patterns("__pycache__"))
    _replace(package / "__init__.py", r'__version__ = ".*"', '__version__ = "9.9.9"')
    _add_field(directory)
    for name, lines in changes.items():
        for before, after in lines.items():
            _replace(package / name, rf"^{before}$", after)
    for name in ("client/link.py", "api/rpc/engine_service.py"):
        _replace(package / name, r"(pb\.\w+(?:Request|Reply)\()", r'\1added_later="news", ', 0)
    # The package before the one that is installed; safe: not the folder it is started in.
    return {"PYTHONPATH": f"{directory}:{ROOT}", "PYTHONSAFEPATH": "1"}


def _add_field(directory: Path) -> None:
    """Let every message have a field that nobody here knows."""
    shutil.copytree(ROOT / "proto", directory / "proto")
    protos = [str(path) for path in sorted((directory / "proto").glob("kvtier/v1/*.proto"))]
    for proto in map(Path, protos):
        _replace(proto, r"^message (\w+) \{(\})?", r"message \1 { string added_later = 99; \2", 0)
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={directory / 'proto'}"]
    outputs = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
    subprocess.run([*command, *outputs, *protos], check=True, timeout=60)


def _replace(path: Path, pattern: str, after: str, most: int = 1) -> None:
    text, count = re.subn(pattern, after, path.read_text(), count=most, flags=re.MULTILINE)
    assert count, f"{path.name} has no {pattern}: this copy would be no newer one"
    path.write_text(text)
