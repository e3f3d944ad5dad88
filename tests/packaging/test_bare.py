"""Without any extra each command works, or says in one line which extra it needs."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bare import bare_python

from kvtier.cli.commands import COMMANDS
from kvtier.testing.child import Child, work_directory
from kvtier.testing.running_node import RunningNode

ROOT = Path(__file__).resolve().parents[2]

EXTRAS = "cupy gguf hiredis openai opentelemetry redis tokenizers torch transformers vllm"
FOUND = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name)))
"""

HELP = """
import sys
from kvtier.cli.main import main
for name in sys.argv[1:]:
    try:
        main([name, "--help"])
    except SystemExit as ended:
        assert ended.code == 0
"""

CLIENT = """
import sys
from pathlib import Path
import kvtier.client
sys.path.insert(0, sys.argv[2])
from tests.integration.pattern import PatternEngine
with PatternEngine(Path(sys.argv[1])) as engine:
    stored = engine.store(1)
    print(stored, *engine.load(1)[0])
"""


@dataclass(frozen=True)
class Bare:
    """A daemon of such an environment, and commands beside it."""

    python: Path
    node: RunningNode
    daemon: Child

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.python, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=self.node.directory,
            env={name: value for name, value in os.environ.items() if "PYTHON" not in name},
        )

    def kvtier(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("-m", "kvtier", *arguments)


@pytest.fixture(scope="module")
def bare() -> Iterator[Bare]:
    with work_directory() as folder:
        python = bare_python(folder / "environment")
        node = RunningNode(folder)
        command = [str(python), "-m", "kvtier", "serve", *node.arguments()]
        with Child(command, folder / "log") as daemon:
            daemon.await_log("event=ready")
            yield Bare(python, node, daemon)


def test_no_extra_is_there(bare: Bare) -> None:
    assert bare.run("-c", FOUND, *EXTRAS.split()).stdout.split() == []


def test_a_client_stores_and_loads(bare: Bare) -> None:
    done = bare.run("-c", CLIENT, str(bare.node.socket), str(ROOT))
    assert (done.returncode, done.stdout) == (0, "4 cpu cpu cpu cpu\n"), done


def test_every_command_has_help(bare: Bare) -> None:
    done = bare.run("-c", HELP, *COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("exit codes:") == len(COMMANDS)


@pytest.mark.parametrize(
    "line",
    [
        "stat --connect k.sock",
        "stat --check --connect k.sock",
        "top --once --interval 200ms --connect k.sock",
        "tier list --connect k.sock",
        "probe --connect k.sock",
        "drop --tier cpu --connect k.sock",
        "fsck --connect k.sock",
        "config check",
        "config schema",
        "config show --running --connect k.sock",
        "completion bash",
        "plan --model-layers 1 --kv-heads 1 --head-dim 1 --sessions 1 --prompt-tokens 99 --jobs 1",
    ],
)
def test_it_works(bare: Bare, line: str) -> None:
    done = bare.kvtier(*line.split())
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout or "--check" in line


def test_the_doctor_looks_at_all(bare: Bare) -> None:
    done = bare.kvtier("doctor", "--set", "daemon.socket=k.sock")
    assert done.stderr == ""
    assert re.search(r"\d+ ok, \d+ warn, \d+ fail\n$", done.stdout)


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("engine --model m.gguf --alone", "engine"),
        ("serve --model m.gguf --set daemon.socket=other.sock --set ssd.enabled=false", "engine"),
        ("plan m.gguf --sessions 1 --prompt-tokens 99", "engine"),
        ("demo", "demo"),
        ("serve --set remote.url=redis://h/0 --set ssd.enabled=false", "redis"),
        ("serve --set daemon.traces=true --set ssd.enabled=false", "otel"),
    ],
)
def test_it_names_the_extra_that_it_needs(bare: Bare, line: str, extra: str) -> None:
    (bare.node.directory / "m.gguf").write_bytes(b"GGUF")
    more = ("--set", "daemon.socket=other.sock", "--set", "http.listen=")
    done = bare.kvtier(*line.split(), *(more if line.startswith("serve") else ()))
    assert done.returncode == 2
    told = [each for each in done.stderr.splitlines() if each.startswith("kvtier: ")]
    assert len(told) == 1, done.stderr
    assert told[0].endswith(f"pip install 'kvtier[{extra}]'")
    assert "Traceback" not in done.stderr
