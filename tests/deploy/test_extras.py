"""Extras: what one that is missing says, and which there are."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

WITHOUT = """
import sys
sys.modules["redis"] = None
from kvtier.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_redis_a_url_says_what_to_install(tmp_path: Path) -> None:
    settings = {
        "daemon.socket": tmp_path / "k.sock",
        "remote.url": "redis://redis.example/0",
        "ssd.enabled": "false",
        "http.listen": "",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "serve", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "kvtier: remote.url: needs the redis package; pip install 'kvtier[redis]'" in done.stderr


def test_vllm_is_asked_for_in_the_range_that_is_served() -> None:
    # Read and not imported: vLLM itself is in no environment of these tests.
    source = (ROOT / "kvtier" / "connectors" / "vllm_common" / "release.py").read_text()
    oldest, newest = re.findall(r"^_(?:OLDEST|NEWEST) = \(0, (\d+)\)", source, re.MULTILINE)
    assert EXTRAS["vllm"] == [f"vllm>=0.{oldest},<0.{int(newest) + 1}"]


def test_each_extra_is_told_of() -> None:
    page = (ROOT / "docs" / "adr" / "0006-dependencies.md").read_text()
    for extra in EXTRAS.keys() - {"dev"}:
        assert f"`{extra}`" in page or f"kvtier[{extra}]" in page, extra
