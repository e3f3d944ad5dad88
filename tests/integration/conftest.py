"""Fixtures: a tiny model for engines, and a browser, each created once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.programs import requires

SHOWN_MS = 30_000
"""Within a few seconds, also on a busy machine."""


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start a browser to which evil.example is this machine."""
    program = requires("chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=SHOWN_MS)
        browser = playwright.chromium.launch(
            executable_path=program,
            args=[
                "--host-resolver-rules=MAP evil.example 127.0.0.1",
                # Other browsers lack this protection, so the tests must not depend on it.
                "--disable-features=LocalNetworkAccessChecks",
            ],
        )
        yield browser
        browser.close()
