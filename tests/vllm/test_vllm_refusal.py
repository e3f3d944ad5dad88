"""What is not served is refused by name, once, and vLLM goes on: models, settings, layouts."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.vllm.block_identity import (
    BlockFacts,
    KeySpaceResolver,
    RankReport,
    block_ratio,
)
from kvtier.connectors.vllm_common.model_config import model_config
from kvtier.connectors.vllm_common.refusal import layer_specs, refusal
from kvtier.core.layout import KVLayout
from kvtier.testing.child import await_true, work_directory
from kvtier.testing.running_node import RunningNode
from tests.vllm.small_vllm import SmallVllm
from tests.vllm.test_vllm_identity import save_model

WEIGHTS = bytes(range(32))


class FullAttentionSpec(SimpleNamespace):
    """As vLLM calls it; only the name and some fields count."""


class SlidingWindowSpec(SimpleNamespace):
    """See above."""


class UniformTypeKVCacheSpecs(SimpleNamespace):
    """See above."""


class Written(SimpleNamespace):
    """A configuration of transformers."""

    def to_json_string(self, use_diff: bool) -> str:
        assert not use_diff, "what has its default counts as well"
        return json.dumps(vars(self))


def groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs], num_blocks=8
    )


def config(**changed: Any) -> Any:
    """vLLM's configuration of a plain model; ``model__quantization="fp8"`` changes a part."""
    parts: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "org/m",
            "hf_config": Written(model_type="llama", hidden_size=8),
            "max_model_len": 4096,
            "quantization": None,
        },
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "kv_transfer_config": {"kv_role": "kv_both"},
        "load_config": {"load_format": "auto"},
        "parallel_config": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "distributed_executor_backend": "mp",
        },
    }
    fields: dict[str, Any] = {
        "speculative_config": None,
        "lora_config": None,
        "additional_config": {},
    }
    for name, value in changed.items():
        part, _, setting = name.partition("__")
        if setting:
            parts[f"{part}_config"][setting] = value
        else:
            fields[name] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**part) for name, part in parts.items()}, **fields
    )


PLAIN = groups(FullAttentionSpec())


def test_a_plain_model_is_served() -> None:
    assert refusal(config(), PLAIN) == ""
    uniform = UniformTypeKVCacheSpecs(kv_cache_specs={"a": FullAttentionSpec()})
    assert refusal(config(), groups(uniform)) == ""
    assert layer_specs(uniform) == [FullAttentionSpec()]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kv_transfer__kv_role": "kv_producer"}, "kv_role kv_producer splits prefill from decode"),
        ({"kv_transfer__kv_role": "kv_consumer"}, "kv_role kv_consumer splits prefill from decode"),
        ({"cache__enable_prefix_caching": False}, "vLLM's own prefix caching is off"),
        ({"model__is_prefix_caching_supported": False}, "vLLM does not support prefix caching"),
        ({"load__load_format": "dummy"}, "weights of load format dummy"),
        ({"load__load_format": "tensorizer"}, "weights of load format tensorizer"),
        ({"load__load_format": "npcache"}, "weights of load format npcache"),
        ({"load__model_loader_extra_config": {"pattern": "/b"}}, "a custom pattern"),
        (
            {"model__hf_config": Written(text_model_id="org/t")},
            "weights come from org/t as well (text_model_id)",
        ),
        ({"model__hf_config": Written(audio_model_id="org/a")}, "org/a as well (audio_model_id)"),
        ({"model__model_weights": "s3://b/m"}, "weights come from s3://b/m"),
        ({"weight_transfer_config": object()}, "weight_transfer_config"),
        ({"parallel__worker_extension_cls": "a.B"}, "a.B may replace weights"),
        ({"model__enable_sleep_mode": True}, "enable_sleep_mode"),
        ({"cache__cache_dtype": "int8_per_token_head"}, "KV dtype int8_per_token_head"),
        ({"cache__calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"speculative_config": SimpleNamespace(method="mtp")}, "speculative decoding by mtp"),
        ({"diffusion_config": object()}, "diffusion_config"),
        ({"engram_config": object()}, "engram_config"),
        ({"model__is_encoder_decoder": True}, "depends on an encoder's output"),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"parallel__prefill_context_parallel_size": 4}, "prefill_context_parallel_size"),
        ({"parallel__nnodes": 2}, "workers may be on other machines"),
        ({"parallel__distributed_executor_backend": "ray"}, "workers may be on other machines"),
    ],
)
def test_settings_are_refused_by_name(changed: dict[str, Any], told: str) -> None:
    line = refusal(config(**changed), PLAIN)
    assert line.startswith("org/m: ")
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "changed",
    [
        {"speculative_config": SimpleNamespace(method="ngram")},
        {"cache__cache_dtype": "fp8_e4m3"},
        {"load__load_format": "safetensors"},
        {"load__model_loader_extra_config": {"enable_multithread_load": True}},
        {"model__hf_config": Written(text_model_id=None)},
        {"parallel__tensor_parallel_size": 8},
        {"model__quantization": "fp8"},
    ],
)
def test_settings_that_the_identity_has_are_served(changed: dict[str, Any]) -> None:
    assert refusal(config(**changed), PLAIN) == ""


@pytest.mark.parametrize(
    ("specs", "told"),
    [
        ([SlidingWindowSpec()], "layers with SlidingWindowSpec"),
        (
            [FullAttentionSpec(), SlidingWindowSpec()],
            "2 groups of KV (FullAttentionSpec, SlidingWindowSpec), only one is supported",
        ),
        ([], "0 groups of KV"),
        ([FullAttentionSpec(non_causal=True)], "attend to later tokens"),
        ([FullAttentionSpec(compress_ratio=4)], "one state for several tokens"),
        ([FullAttentionSpec(tokens_per_state=4)], "one state for several tokens"),
        (
            [
                UniformTypeKVCacheSpecs(
                    kv_cache_specs={"a": FullAttentionSpec(), "b": SlidingWindowSpec()}
                )
            ],
            "layers with SlidingWindowSpec",
        ),
    ],
)
def test_kinds_of_kv_are_refused_by_name(specs: list[Any], told: str) -> None:
    assert told in refusal(config(), groups(*specs))


# The model's configuration


@pytest.mark.parametrize(
    "changed",
    [
        {"model__hf_config": Written(model_type="llama", hidden_size=16)},
        {"model__quantization": "fp8"},
        {"model__quantization_config": {"linear": "int8"}},
        {"model__model_impl": "transformers"},
        {"model__disable_sliding_window": True},
        {"model__multimodal_config": SimpleNamespace(mm_processor_kwargs={"size": 2})},
        {"cache__kv_cache_dtype_skip_layers": ["0"]},
        {"parallel__tensor_parallel_size": 2},
        {"parallel__pipeline_parallel_size": 2},
        {"lora_config": SimpleNamespace(lora_dtype="float16")},
        {"load__load_format": "pt"},
        {"additional_config": {"x": {"y"}}},
    ],
)
def test_what_changes_kv_changes_the_configuration(changed: dict[str, Any]) -> None:
    assert model_config(config(**changed)) != model_config(config())


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_dtype": "bfloat16"},
        {"target_modules": ["o_proj"]},
        {"enable_tower_connector_lora": True},
        {"enable_moe_shared_loras": True},
        {"enable_mixed_moe_lora_format": True},
    ],
)
def test_what_changes_an_adapter_changes_the_configuration(changed: dict[str, Any]) -> None:
    plain, other = (
        model_config(config(lora_config=SimpleNamespace(**({"lora_dtype": "float16"} | part))))
        for part in ({}, changed)
    )
    assert plain != other


def test_settings_of_generation_count_where_attention_depends_on_them() -> None:
    def known(name: str, file: dict[str, Any], told: dict[str, Any], length: int) -> str:
        return model_config(
            config(
                model__hf_config=Written(text_config={"model_type": name}),
                model__max_model_len=length,
                model__try_get_generation_config=lambda: file,
                model__override_generation_config=told,
            )
        )

    scaled = {"attn_temperature_tuning": True}
    cases: list[Any] = [({}, {}, 8192), (scaled, {}, 8192), ({}, {}, 65536)]
    assert len({known("llama4_text", *case) for case in cases}) == 3
    assert known("llama4", {}, scaled, 8192) == known("llama4", scaled, {}, 8192)
    named = {"transformers_version": "5"}
    assert known("llama4", named, {}, 8192) == known("llama4", {}, {}, 8192)
    assert len({known("llama", *case) for case in cases}) == 1


def test_names_do_not_count() -> None:
    names = {"_name_or_path": "/a", "transformers_version": "9", "_commit_hash": "c"}
    text = SimpleNamespace(**names)
    named = Written(model_type="llama", hidden_size=8, **names)
    assert model_config(config(model__hf_config=named)) == model_config(config())
    inner = Written(text_config=vars(text))
    assert model_config(config(model__hf_config=inner)) == model_config(
        config(model__hf_config=Written(text_config={}))
    )


def test_the_greatest_length_counts_where_positions_depend_on_it() -> None:
    scaled = Written(rope_parameters={"rope_type": "longrope"})
    long, short = (
        model_config(config(model__hf_config=scaled, model__max_model_len=length))
        for length in (131072, 4096)
    )
    assert long != short
    assert model_config(config(model__max_model_len=8)) == model_config(config())


def test_a_setting_without_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a setting has no stable text"):
        model_config(config(additional_config={"x": object()}))


@pytest.mark.parametrize(("block_tokens", "ratio"), [(16, 4), (48, 2), (64, 1), (128, 1)])
def test_blocks_of_ours_are_whole_blocks_of_vllm(block_tokens: int, ratio: int) -> None:
    assert block_ratio(block_tokens) == ratio


# The start


def facts(rank: int = 0, size: int = 1, block_tokens: int = 64) -> RankReport:
    layout = KVLayout("vllm-lbhnc", 1, block_tokens, 4096, "float32", "small")
    blocks = BlockFacts("{}", layout, "float32", "vllm", "auto", size, rank, block_tokens // 16)
    return RankReport(blocks)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def begun(start: KeySpaceResolver, *ranks: RankReport) -> list[Any]:
    start.set_ranks(ranks)
    try:
        return start.take_spaces()
    finally:
        start.close()


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files be older than this process, which made them."""
    later_ns = time.time_ns() + 3600 * 10**9
    monkeypatch.setattr("kvtier.connectors.vllm.block_identity.began_ns", lambda: later_ns)


@pytest.mark.usefixtures("long_ago")
def test_a_start_gives_a_space_for_each_rank(model: Path) -> None:
    start = KeySpaceResolver(lambda: model, "")
    spaces = begun(start, facts(0, 2), facts(1, 2))
    assert [space.parallel_rank for space in spaces] == [0, 1]
    assert start.weights == spaces[0].weights != b""
    assert start.num_engine_blocks == 4
    assert start.take_spaces() == [], "but once"


@pytest.mark.usefixtures("long_ago")
@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (
            [RankReport(None, "layer a is odd"), RankReport(None, "layer a is odd")],
            "layer a is odd",
        ),
        ([facts(0, 2), facts(1, 2, block_tokens=128)], "tokens 64 in 4 and 128 in 8 vLLM blocks"),
    ],
)
def test_ranks_that_cannot_be_served_are_told_once(
    model: Path, ranks: list[RankReport], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    start = KeySpaceResolver(lambda: model, "")
    assert begun(start, *ranks) == []
    assert start.take_spaces() == []
    assert reasons(caplog) == [told] or reasons(caplog)[0].endswith(told)


@pytest.mark.usefixtures("long_ago")
def test_a_model_that_is_read_for_long_holds_nobody_up(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.connectors.vllm.block_identity._WAIT_S", 0.0)
    gate = threading.Event()

    def find() -> Path:
        assert gate.wait(30)
        return model

    start = KeySpaceResolver(find, "")
    start.set_ranks([facts()])
    assert start.take_spaces() == []
    assert start.weights == b""
    gate.set()
    assert await_true(start.take_spaces, "the weights are known")[0].weights == start.weights
    start.close()


def test_weights_that_just_changed_are_told(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert begun(KeySpaceResolver(lambda: model, ""), facts()) == []
    assert "model.safetensors has changed since the engine started" in reasons(caplog)[0]


def test_what_is_refused_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> Path:
        raise AssertionError

    start = KeySpaceResolver(find, "org/m: 2 groups of KV")
    assert begun(start, facts()) == []
    assert reasons(caplog) == ["org/m: 2 groups of KV"]


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        str(record.kvtier_fields["reason"])  # type: ignore[attr-defined]  # of our log
        for record in caplog.records
        if record.message == "vLLM's blocks are not cached"
    ]


# The daemon


def test_an_unknown_layout_is_refused_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    layout = KVLayout("vllm-of-tomorrow", 1, 64, 4096, "float32", "small")
    blocks = BlockFacts("{}", layout, "float32", "vllm", "auto", 1, 0, 4)
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon():
            space, deadlines = blocks.space(WEIGHTS), ClientDeadlines(1, 1, 1, 0.05)
            client = Client(node.socket, space, "vllm", deadlines=deadlines)
            client.start()
            await_true(lambda: bool(told(caplog)), "the refusal is said")
            with SmallVllm(node.socket) as small:  # others are served, and this one is not
                assert small.prefill(list(range(1000, 1300)), list(range(1, 20))) == (0, set())
            assert not client.is_attached
            client.close()
    assert len(told(caplog)) == 1, "once, however often it is tried"
    assert "vllm-of-tomorrow" in told(caplog)[0]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = (f"{r.message} {getattr(r, 'kvtier_fields', '')}" for r in caplog.records)
    return [line for line in lines if "layout" in line]
