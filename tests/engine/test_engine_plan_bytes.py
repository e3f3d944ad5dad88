"""What a plan takes for a block of a model is what the engine really stores of it."""

import pytest

from kvtier.engine.engine import block_layout
from kvtier.engine.settings import EngineSettings
from kvtier.sim.replay.prefill import read_dimensions
from tests.engine.models import load_tiny


def check(folder, loaded, block_tokens=64):
    planned = read_dimensions(folder, loaded.dtype_name)
    layout = block_layout(loaded, EngineSettings(block_tokens=block_tokens))
    assert planned.layout(block_tokens).block_bytes == layout.block_bytes
    assert planned.token_bytes * block_tokens == layout.block_bytes


def test_a_folder_is_planned_as_the_engine_stores_it(tmp_path):
    for model_type in ("llama", "mistral", "qwen2", "qwen3"):
        folder = tmp_path / model_type
        check(folder, load_tiny(folder, model_type))


@pytest.mark.model
@pytest.mark.slow
def test_the_demo_model_is_planned_as_the_engine_stores_it(demo_model, demo):
    check(demo_model, demo)
