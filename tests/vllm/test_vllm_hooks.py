"""What a release of vLLM asks of a connector, and what of it we serve, by its own classes."""

import json
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


@pytest.mark.parametrize("release", RELEASES)
def test_the_connector_fits_a_release(release: str) -> None:
    python = ROOT / ".vllm" / release / "bin" / "python"
    script = Path(__file__).with_name("in_vllm_hooks.py")
    words = [str(python), str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["release"].startswith(release)
    assert told["served"] == ["FullAttentionSpec", "MLAAttentionSpec"]
