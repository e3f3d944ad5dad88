"""What a release of vLLM asks of a connector, what of it we serve, and what never comes out."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.servers import RELEASES

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it"),
]


def run(release: str, script: str) -> str:
    """Return the last line that a script of ours says in the environment of a release."""
    words = [str(ROOT / ".vllm" / release / "bin" / "python"), str(ROOT / "tests/vllm" / script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("release", RELEASES)
def test_what_breaks_behind_a_hook_stays_there(release: str) -> None:
    assert run(release, "in_vllm_walls.py").endswith(": ok")


@pytest.mark.parametrize("release", RELEASES)
def test_the_connector_fits_a_release(release: str) -> None:
    told = json.loads(run(release, "in_vllm_hooks.py"))
    assert told["release"].startswith(release)
    assert told["served"] == ["FullAttentionSpec", "MLAAttentionSpec"]
