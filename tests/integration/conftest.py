"""A tiny model for the engines of these tests, made once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engine.models import save_tiny

    return save_tiny(tmp_path_factory.mktemp("model") / "tiny-llama")
