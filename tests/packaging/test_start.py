"""A command imports what it needs and no more, and can be interrupted while it does."""

import os
import subprocess
import sys

import pytest

CALL = "import sys; from kvtier.cli.main import main; sys.exit(main(sys.argv[1:]))"

LOADED = """
import sys
from kvtier.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("loaded", *sys.modules)
"""

INTERRUPT = """
import os, signal, sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
"""


def call(program: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], {"grpc", "numpy", "pydantic", "rich", "kvtier.config"}),
        (["--version"], {"grpc", "numpy", "pydantic", "rich", "kvtier.config"}),
        (["stat", "--help"], {"numpy", "cryptography", "rich", "uvicorn", "kvtier.daemon"}),
        (["serve", "--help"], {"rich", "shtab", "torch", "kvtier.sim", "kvtier.cli.stat"}),
    ],
    ids=lambda each: " ".join(sorted(each)),
)
def test_a_command_imports_no_other(arguments, unwanted):
    done = call(LOADED, *arguments)
    loaded = set(done.stdout.rpartition("\nloaded ")[2].split())
    assert "kvtier.cli.main" in loaded, done
    assert not loaded & unwanted


@pytest.mark.parametrize(
    "module", ["kvtier.cli.stat", "grpc", "grpc._cython.cygrpc", "pydantic", "asyncio"]
)
def test_an_interrupt_during_the_start_is_quiet(module, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    socket = str(tmp_path / "no.sock")
    done = call(CALL, "stat", "--connect", socket, PYTHONPATH=str(tmp_path), INTERRUPT_AT=module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
