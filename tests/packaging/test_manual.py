"""The manual pages as readers of such pages take them."""

import re
import subprocess
from pathlib import Path

import pytest

from kvtier.cli.commands import COMMANDS
from kvtier.config.model import section_models
from kvtier.config.section import key_of
from tests.programs import requires

MAN = Path(__file__).resolve().parents[2] / "docs" / "man"
PAGES = ("kvtier.1", "kvtier.toml.5")


def mandoc(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [requires("mandoc"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=MAN)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_in_a_page_is_wrong(page):
    done = mandoc("-T", "lint", "-W", "warning", page)
    # There is none, so that a page is the same on each day that it is written.
    wrong = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert not wrong


def shown(page: str) -> str:
    """What a terminal shows of a page, without bold and underlined letters being struck over."""
    return re.sub(".\b", "", mandoc("-T", "utf8", "-O", "width=200", page).stdout)


def test_a_terminal_gets_every_command_and_what_can_be_copied():
    page = shown("kvtier.1")
    for name, command in COMMANDS.items():
        assert f"kvtier {name}\n" in page
        assert all(f"    {example}\n" in page for example in command.examples)
    assert "pip install 'kvtier[engine]'" in page


def test_a_terminal_gets_every_key_of_the_configuration():
    page = shown("kvtier.toml.5")
    for section, model in section_models().items():
        _, _, part = page.partition(f"\n[{section}]\n")
        assert all(f"       {key_of(name)} (" in part for name in model.model_fields)
