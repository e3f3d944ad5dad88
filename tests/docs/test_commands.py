"""Runs the commands of README and quickstart in order, as a new user would.

The user has an empty home, this environment's ``kvtier`` under ``.venv``, and a tiny model at the
path of the demo model. Only ports and sizes differ from the pages.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.testing.child import Child, free_port, work_directory
from tests.engine.models import save_tiny
from tests.programs import requires

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")

NOT_RUN: Mapping[str, str] = {
    r"make ": "continuous integration runs these",
    r"kvtier demo ": "tests/integration/test_demo.py runs it",
    r"--config kvtier\.toml": "its paths are those of a server",
    r"^pip install kvtier|^vllm serve|cpu\.capacity=64GiB": "make test-vllm runs similar ones",
}
"""Part of a command -> why it is not run here."""

SIZES: Mapping[str, str] = {
    "KVTIER_CPU_CAPACITY": "128MiB",
    "KVTIER_SSD_CAPACITY": "1GiB",
    "KVTIER_SSD_FREE_SPACE_FLOOR": "0",
    "KVTIER_ENGINE_POOL": "32MiB",
}


def commands_of(page: str) -> list[str]:
    """Return the commands of a page's ``sh`` blocks; open quotes continue a command."""
    commands = []
    for block in re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    ):
        pending = ""
        for line in block.splitlines():
            pending += line + "\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:
                continue  # a quote is open
            if words:
                commands.append(pending.strip())
            pending = ""
        assert not pending, f"{page}: a quote is never closed: {pending}"
    return commands


def reason_not_to_run(command: str) -> str:
    return next((why for part, why in NOT_RUN.items() if re.search(part, command)), "")


class User:
    """Runs commands in its own directory; servers run until the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ports = {port: str(free_port()) for port in ("8000", "8001", "9464")}
        program = directory / ".venv" / "bin" / "kvtier"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvtier "$@"\n')
        program.chmod(0o700)
        (directory / ".model").mkdir()
        model = save_tiny(directory / "smollm2-135m-instruct")
        (directory / ".model" / "smollm2-135m-instruct.gguf").symlink_to(model)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")
        }
        self._environment |= SIZES
        self._environment |= {
            "PYTHONPATH": str(ROOT),
            "HOME": str(directory),
            "XDG_RUNTIME_DIR": str(directory),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "KVTIER_ENGINE_LISTEN": f"127.0.0.1:{self._ports['8000']}",
            "KVTIER_HTTP_LISTEN": f"127.0.0.1:{self._ports['9464']}",
        }
        self.servers: list[Child] = []

    def give(self, command: str) -> None:
        for port, ours in self._ports.items():
            command = command.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ours}")
        if re.search(r"kvtier (serve|engine)\b", command):
            server = self._start(command)
            self.servers.append(server)
            server.await_log(r"kvtier: \S+ at http://\S+/v1", 120)
        elif {"--watch", "top"} & set(shlex.split(command, comments=True)):
            watching = self._start(command)
            watching.await_log(r"(?s)(leases \d+.*){2}")
            watching.send(signal.SIGINT)
            assert watching.wait() == 130
        else:
            self._run(command)

    def _start(self, command: str) -> Child:
        # `exec`, so that a signal reaches the command instead of a shell.
        shell = ["env", f"--chdir={self._directory}", "bash", "-c", f"exec {command}"]
        log = self._directory / f"log.{len(self.servers)}.{command.count('watch')}"
        return Child(shell, log, self._environment)

    def _run(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert done.stdout, f"{command} says nothing"
        assert not done.stdout.startswith('{"error"'), f"{command}\n{done.stdout}"


@pytest.fixture
def user() -> Iterator[User]:
    with work_directory() as directory:
        user = User(directory)
        try:
            yield user
        finally:
            for server in reversed(user.servers):
                if server.is_running:
                    server.send(signal.SIGTERM)
                    server.wait(60)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_it_says(page: str, user: User) -> None:
    commands = [command for command in commands_of(page) if not reason_not_to_run(command)]
    assert any("kvtier serve" in command for command in commands), "it shows how to serve"
    for command in commands:
        if command.startswith("curl"):
            requires("curl")
        user.give(command)
    assert all(server.is_running for server in user.servers)


def test_no_exception_is_left_over() -> None:
    commands = [command for page in PAGES for command in commands_of(page)]
    for part, why in NOT_RUN.items():
        assert why
        assert any(re.search(part, command) for command in commands), f"no command has {part!r}"
