from pathlib import Path

import pytest
from ssd_files import Opener


@pytest.fixture
def ssd(tmp_path: Path):
    opener = Opener(tmp_path / "ssd")
    yield opener
    for tier in opener.tiers:
        tier.close()
