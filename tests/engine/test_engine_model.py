"""What is refused, by name and before anything is allocated, and what a loaded model offers."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from kvtier.engine.chat_template import end_tokens
from kvtier.engine.model import LoadedModel, load_model
from kvtier.errors import StartError
from tests.engine.models import save_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def _change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is an encoder-decoder model"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, r"latent attention \(MLA\)"),
        ({"model_type": "mamba"}, "models of type 'mamba' are not supported"),
        ({"model_type": "gemma3_text"}, "models of type 'gemma3_text' are not supported"),
        ({"model_type": None}, "models of type 'None' are not supported"),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
            r"layers of type \['linear_attention'\]",
        ),
        ({"layer_types": ["sliding_attention"] * 3}, r"layers of type \['sliding_attention'\]"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "does not generate text"),
        ({"quantization_config": {"quant_method": "awq"}}, "the weights are quantized"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "RoPE type 'dynamic' is not supported",
        ),
    ],
)
def test_configurations_that_are_refused(
    folder: Path, fields: dict[str, Any], problem: str
) -> None:
    _change(folder, **fields)
    with pytest.raises(StartError, match=problem) as caught:
        load_model(folder)
    assert caught.value.field == "engine.model"
    assert caught.value.remedy


def test_sliding_window_within_the_context(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "mistral", sliding_window=256)
    with pytest.raises(StartError, match="a sliding attention window of 256 tokens"):
        load_model(folder)
    assert load_model(folder, context_limit=256).context_limit == 256


def test_sliding_window_of_some_layers(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64}
    folder = save_tiny(tmp_path / "model", "qwen2", max_window_layers=1, **changes)
    with pytest.raises(StartError, match="sliding_attention"):
        load_model(folder)


@pytest.mark.parametrize(
    ("missing", "problem"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"has no \*.safetensors"),
        ("tokenizer.json", "has no tokenizer.json"),
    ],
)
def test_missing_files(folder: Path, missing: str, problem: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(StartError, match=problem):
        load_model(folder)


def test_missing_path_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="does not exist"):
        load_model(tmp_path / "nothing")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(StartError, match="is not a GGUF file"):
        load_model(tmp_path / "text.gguf")


def _gguf_header(model_type: str) -> bytes:
    value = struct.pack("<IQ", 8, len(model_type)) + model_type.encode()
    return b"GGUF" + bytes(100) + b"general.architecture" + value


@pytest.mark.parametrize("name", ["llama.rope.scaling.factor", "rope_freqs.weight"])
def test_a_gguf_whose_rope_would_be_lost(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(_gguf_header("llama") + name.encode())
    with pytest.raises(StartError, match="scaled RoPE"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("header", [_gguf_header("qwen2"), b"GGUF" + bytes(100)])
def test_a_gguf_of_a_type_not_verified(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(header)
    with pytest.raises(StartError, match="are not supported"):
        load_model(tmp_path / "model.gguf")


def test_damaged_files(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(StartError, match="cannot read the weights"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(StartError, match="is not valid"):
        load_model(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": "many"},
        {"layer_types": 3},
        {"rope_parameters": [1]},
        {"num_hidden_layers": "three"},
        {"hidden_size": 47},
    ],
)
def test_values_of_the_wrong_kind(folder: Path, fields: dict[str, Any]) -> None:
    _change(folder, **fields)
    with pytest.raises(StartError) as caught:
        load_model(folder)
    assert caught.value.field == "engine.model"
    assert "\n" not in str(caught.value)


def test_a_gguf_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(_gguf_header("llama"))
    with pytest.raises(StartError, match="cannot read the configuration"):
        load_model(tmp_path / "model.gguf")


def test_a_missing_tensor_is_not_made_up(folder: Path) -> None:
    _change(folder, num_hidden_layers=4)
    with pytest.raises(StartError, match="9 tensors are missing or mismatched"):
        load_model(folder)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"device": "tpu"}, "engine.device"),
        ({"dtype": "float8"}, "engine.dtype"),
        ({"context_limit": 5000}, "engine.context_limit"),
        ({"context_limit": -1}, "engine.context_limit"),
    ],
)
def test_settings_that_are_refused(folder: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(StartError) as caught:
        load_model(folder, **options)
    assert caught.value.field == field


def test_a_loaded_model(tiny: LoadedModel) -> None:
    assert tiny.model_id == "tiny-llama"
    assert tiny.context_limit == 1024
    assert tiny.vocab_size == 256
    assert tiny.token_characters_max == len("<pad>")
    assert tiny.eos_ids == {2}
    assert (tiny.num_layers, tiny.num_kv_heads, tiny.head_dim) == (3, 2, 8)
    assert (tiny.dtype_name, tiny.device_type) == ("float32", "cpu")
    assert tiny.decode(tiny.encode("Hello there")) == "Hello there"
    messages = [{"role": "user", "content": "Hi"}]
    assert tiny.decode(tiny.apply_chat_template(messages)) == "user: Hi\nassistant: "


def test_special_tokens_that_a_message_spells_out_are_text(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": "Hi<eos>"}]
    assert tiny.encode("<eos>") == [2]
    assert 2 not in tiny.apply_chat_template(messages)
    assert 2 in replace(tiny, parse_special_in_messages=True).apply_chat_template(messages)


def _add_special_tokens(folder: Path, *tokens: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": list(tokens)})
    tokenizer.save_pretrained(folder)


def test_end_tokens_of_the_generation_config(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 7, 9]}))
    assert load_model(folder).eos_ids == {2, 7, 9}


def test_end_tokens_of_the_tokenizer_config(folder: Path) -> None:
    _change(folder, eos_token_id=None)
    (folder / "generation_config.json").unlink()
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"extra_special_tokens": {"eot_token": "<pad>"}}
    file.write_text(json.dumps(fields))
    assert load_model(folder).eos_ids == {0, 2}


TURNS = "{% for m in messages %}<turn>{{ m.role }} {{ m.content }} <turn_end>x\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (TURNS, ["<turn_end>x"]),
        (TURNS.replace("x\n", "\n"), ["<turn_end>"]),
        (
            TURNS.replace("<turn_end>x", ""),
            ["<turn>"],
        ),  # the next turn begins, so this one has ended
        ("{{ raise_exception('no') }}", []),
        ("{{ messages[0].nothing.at_all }}", []),
        ("<turn_end>", []),
        ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", []),
    ],
)
def test_end_token_of_the_chat_template(folder: Path, template: str, named: list[str]) -> None:
    _add_special_tokens(folder, "<turn>", "<turn_end>", "<turn_end>x")
    (folder / "chat_template.jinja").write_text(template)
    loaded = load_model(folder)
    assert loaded.eos_ids == {2, *(loaded.special_tokens[name] for name in named)}


def test_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    writer.add_eom_token_id(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    config = SimpleNamespace(eos_token_id=3)
    model = SimpleNamespace(config=config, generation_config=config)
    tokenizer = SimpleNamespace(chat_template=None, eos_token_id=3)
    assert end_tokens(path, model, tokenizer) == {3, 5, 8}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[1].content }}", "has no element 1"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_refuses(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=f"the chat template refused the messages: .*{reason}"):
        tiny.apply_chat_template([{"role": "user", "content": "Hi"}])
    monkeypatch.setattr(tiny.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="chat"):
        tiny.apply_chat_template([{"role": "user", "content": "Hi"}])
