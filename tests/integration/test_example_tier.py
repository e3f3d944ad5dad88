"""Adding a tier takes its own package and two edited files: a real daemon restores from it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.core.residency import TierName
from kvtier.testing.tier_contract import TierContract
from kvtier.tiers.base import Tier
from tests.example_tier.tier import DirectoryTier

ROOT = Path(__file__).resolve().parents[2]

EDITS: Mapping[str, Mapping[str, str]] = {
    "kvtier/core/tier_registry.py": {
        '    SSD = "ssd"\n': '    SSD = "ssd"\n    DIRECTORY = "directory"\n',
        "    TierName.REMOTE: TierSpec(\n": (
            "    TierName.DIRECTORY: TierSpec(\n"
            "        wire_number=5,\n"
            "        prior=TransferPrior(1e-3, 1e-4, 1e8),\n"
            "        is_persistent=True,\n"
            '        package="example_tier",\n'
            "    ),\n"
            "    TierName.REMOTE: TierSpec(\n"
        ),
    },
    "proto/kvtier/v1/engine.proto": {
        "  TIER_REMOTE = 4;\n": "  TIER_REMOTE = 4;\n  TIER_DIRECTORY = 5;\n",
    },
}
"""What is edited by hand, besides the tier's own package ``tests/example_tier``."""


class TestDirectoryTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = DirectoryTier(tmp_path / "blocks", 16 << 20, TierName.SSD)
        yield tier
        tier.close()


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """Return a folder with a copy of kvtier in which the tier is registered."""
    for name in ("kvtier", "proto"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, replaced in EDITS.items():
        text = (tmp_path / name).read_text()
        for old, new in replaced.items():
            assert text.count(old) == 1, f"{name} has one place for it"
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(edited: Path, *words: str) -> str:
    """Run Python with that copy, and return its output."""
    path = os.pathsep.join(map(str, (edited, ROOT / "tests", ROOT)))
    done = subprocess.run(
        [sys.executable, *words],
        cwd=edited,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_daemon_restores_from_it(edited: Path) -> None:
    assert len(EDITS) <= 3
    run(edited, str(ROOT / "tests" / "example_tier" / "scenario.py"))


@pytest.mark.slow
def test_its_settings_are_checked_and_shown(edited: Path) -> None:
    setting = "directory.capacity=1GiB"
    shown = run(edited, "-m", "kvtier", "config", "show", "--effective", "--set", setting)
    assert "[directory]" in shown
    assert 'capacity = "1GiB"' in shown
