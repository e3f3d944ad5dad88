"""The key space of a model: equal for equal models anywhere, another for any difference."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.engine.engine import block_layout
from kvtier.engine.fingerprint import canonical_config, weights_fingerprint
from kvtier.engine.model import LoadedModel, key_space, load_model
from kvtier.engine.settings import EngineSettings
from tests.engine.models import load_tiny, save_tiny


def _digest(loaded: LoadedModel) -> bytes:
    return key_space(loaded, block_layout(loaded, EngineSettings())).digest


def test_one_element_of_any_tensor(tmp_path: Path) -> None:
    model = load_tiny(tmp_path / "model").model
    before = weights_fingerprint(model)
    for name, tensor in model.named_parameters():
        flat = tensor.data.view(-1)
        kept = flat[-1].clone()
        flat[-1] = torch.nextafter(kept, kept + 1)
        assert weights_fingerprint(model) != before, name
        flat[-1] = kept
    assert weights_fingerprint(model) == before


def test_chunks_and_threads_change_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert weights_fingerprint(tiny.model, 1) == weights_fingerprint(tiny.model, 4) == tiny.weights


def test_names_and_shapes_count(tiny: LoadedModel) -> None:
    def fingerprint(**tensors: torch.Tensor) -> bytes:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return weights_fingerprint(module)

    one, two = torch.ones(4), torch.zeros(4)
    assert len({
        fingerprint(a=one, b=two),
        fingerprint(a=two, b=one),
        fingerprint(a=one, c=two),
        fingerprint(a=one.view(2, 2), b=two),
        fingerprint(a=one.view(torch.int32), b=two),
        fingerprint(a=one),
    }) == 6  # fmt: skip
    assert fingerprint(a=one, b=two) == fingerprint(b=two.clone(), a=one.clone())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 1e-5},
        {"seed": 1},
        {"hidden_act": "gelu"},
    ],
)
def test_another_model_has_another_key_space(
    tmp_path: Path, tiny: LoadedModel, changes: dict[str, Any]
) -> None:
    assert _digest(load_tiny(tmp_path / "model", **changes)) != _digest(tiny)


def test_another_rope_factor_only(tmp_path: Path) -> None:
    digests = {
        _digest(
            load_tiny(
                tmp_path / f"model-{factor}",
                rope_parameters={"rope_type": "linear", "factor": factor, "rope_theta": 1e4},
            )
        )
        for factor in (2.0, 4.0, 2.0)
    }
    assert len(digests) == 2


def test_another_dtype_or_block_size(tmp_path: Path, tiny: LoadedModel) -> None:
    folder = save_tiny(tmp_path / "model")
    assert _digest(load_model(folder)) == _digest(tiny)
    assert _digest(load_model(folder, dtype="bfloat16")) != _digest(tiny)
    other = block_layout(tiny, EngineSettings(block_tokens=128))
    assert key_space(tiny, other).digest != _digest(tiny)


def test_paths_and_versions_do_not_count() -> None:
    fields = {"rope": {"b": 1, "a": 2.5}, "hidden_size": 8}
    extra = {"_name_or_path": "/somewhere", "transformers_version": "9", "use_cache": False}
    assert canonical_config(fields) == canonical_config(extra | fields)
    assert canonical_config(fields) == '{"hidden_size":8,"rope":{"a":2.5,"b":1}}'


@pytest.mark.slow
def test_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    program = (
        "import sys; from kvtier.engine.model import load_model\n"
        "from kvtier.engine.engine import block_layout\n"
        "from kvtier.engine.model import key_space\n"
        "from kvtier.engine.settings import EngineSettings\n"
        "loaded = load_model(sys.argv[1])\n"
        "print(key_space(loaded, block_layout(loaded, EngineSettings())).digest.hex())\n"
    )
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    expected = _digest(load_model(folder)).hex()
    folder.rename(moved)
    finished = subprocess.run(
        [sys.executable, "-c", program, str(moved)],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert finished.stdout.strip() == expected
