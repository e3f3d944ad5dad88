"""Models for the engine's tests, each made and loaded once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.engine.model import LoadedModel, load_model
from tests.engine.models import Reference, load_tiny


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute tiny models on one thread: on a busy machine, two wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads if "demo" in request.fixturenames else 1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_tiny(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def reference(tiny: LoadedModel) -> Reference:
    return Reference(tiny)


@pytest.fixture(scope="session")
def demo(demo_model: Path) -> LoadedModel:
    return load_model(demo_model)
