"""The list of faults names tests; each of them must be one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/operations/faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(test_\w+)::(test_\w+)`", DOCUMENT)))


def test_every_fault_names_a_test() -> None:
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| ")]
    without = [row for row in rows if "::" not in row and not row.startswith("| fault")]
    assert not without


@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_test_that_is_named_exists(module: str, name: str) -> None:
    (path,) = ROOT.glob(f"tests/*/{module}.py")
    assert re.search(rf"def {name}\(", path.read_text())
