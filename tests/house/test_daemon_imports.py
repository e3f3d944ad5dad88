"""The daemon serves any engine and computes nothing: it never loads an engine's libraries.

They cost seconds of start and hundreds of megabytes, which an operator pays on every node.
"""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "safetensors", "tokenizers", "gguf", "cupy", "openai")

# What `kvtier serve` imports without a model. Each is a module that exists: a wrong name fails.
DAEMON_MODULES = (
    "kvtier.api.http.daemon_app",
    "kvtier.api.rpc.engine_service",
    "kvtier.api.rpc.operator_service",
    "kvtier.cli.preflight",
    "kvtier.client.client",
    "kvtier.daemon.daemon",
)

PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


@pytest.mark.slow
def test_the_daemon_loads_no_library_of_an_engine():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *DAEMON_MODULES],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "kvtier" in loaded
    assert not loaded & set(HEAVY)
