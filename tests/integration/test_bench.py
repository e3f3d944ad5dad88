"""Every script in bench/ runs and prints its figures, at sizes too small to mean anything."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.programs import redis_program, requires

ROOT = Path(__file__).resolve().parents[2]

SMOKE: Mapping[str, Sequence[str]] = {
    "arena": ("--bytes", "33554432", "--block-bytes", "1048576", "--runs", "1"),
    "hashing": ("--tokens", "4096", "--runs", "1"),
    "lookup": ("--hashes", "64", "--entries", "2000", "--runs", "3"),
    "mix": ("--sim", "--runs", "1", "--ratios", "1", "--hits", "512"),
    "policy": ("--only", "conversation", "--sizes", "1000", "--jobs", "1"),
    "remote": ("--blocks", "8", "--runs", "1", "--block-bytes", "65536"),
    "scrape": ("--entries", "20000", "--scrapes", "3", "--threads", "1"),
    "shared_prefix": ("--requests", "2", "--prefix", "64", "--rounds", "1", "--gap", "0.01"),
    "split": ("--tokens", "257", "--runs", "1", "--warm", "1", "--pace", "1000"),
    "ssd": (
        *("--total-bytes", "8388608", "--block-kib", "256", "--runs", "1"),
        *("--recover-blocks", "5000"),
    ),
    "start": ("--arena", "64MiB", "--runs", "1"),
    "ttft": ("--tokens", "256", "--runs", "1"),
}

NOT_RUN: Mapping[str, str] = {"vllm": "needs an environment with vLLM, which takes gigabytes"}

TRACE = [
    {"timestamp": 1000 * i, "input_length": 1024, "output_length": 9, "hash_ids": [i % 5, 5 + i]}
    for i in range(20)
]


def test_every_script_is_run() -> None:
    assert {path.stem for path in ROOT.glob("bench/*.py")} == SMOKE.keys() | NOT_RUN.keys()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", SMOKE)
def test_a_script_prints_its_figures(name: str, tmp_path: Path, tiny_folder: Path) -> None:
    if name == "ssd":
        requires("fio")
    (tmp_path / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, TRACE)))
    path = f"{Path(redis_program()).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "KVTIER_TRACES": str(tmp_path), "KVTIER_DEMO_MODEL": str(tiny_folder), "PATH": path
    }  # fmt: skip
    command = [sys.executable, ROOT / "bench" / f"{name}.py", *SMOKE[name], "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240,
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    # bench/policy.py exits with 1 if a target is missed; the targets are those of a real trace.
    assert done.returncode in ({0, 1} if name == "policy" else {0}), done.stderr
    figures = list(numbers(json.loads(done.stdout)))
    assert any(figure > 0 for figure in figures)
    assert all(map(math.isfinite, figures))


def numbers(value: object) -> Iterator[float]:
    """Yield every number in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value
