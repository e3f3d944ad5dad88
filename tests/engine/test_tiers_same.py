"""The same tokens from every tier, and the account of where each came from."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.residency import TierName
from kvtier.engine.model import LoadedModel, load_model
from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from tests.engine.attached import BLOCK_TOKENS, AttachedEngine, attached
from tests.engine.models import Reference, load_tiny, save_tiny

pytestmark = pytest.mark.slow

PROMPT_TOKENS = 5 * BLOCK_TOKENS + 20
FULL = 5 * BLOCK_TOKENS


def prompt_of(seed: int, num_tokens: int = PROMPT_TOKENS) -> tuple[int, ...]:
    choose = random.Random(seed)
    return tuple(choose.randrange(3, 256) for _ in range(num_tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> Reference:
    return Reference(loaded)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with work_directory() as directory:
        node = RunningNode(directory)
        with node.daemon():
            yield node


@pytest.fixture
def engine(loaded: LoadedModel, node: RunningNode) -> Iterator[AttachedEngine]:
    with attached(loaded, node.socket) as engine:
        yield engine
    node.await_idle()
    node.drop("cpu", "ssd")


def test_every_tier_gives_the_same_tokens(
    loaded: LoadedModel, reference: Reference, redis_server: str
) -> None:
    prompt = prompt_of(1)
    right = tuple(reference.generate(prompt, 8))
    with work_directory() as directory:
        node = RunningNode(directory, {"remote.url": redis_server, "remote.key_prefix": "same:"})
        rest = PROMPT_TOKENS - FULL
        with node.daemon() as daemon, attached(loaded, node.socket) as engine:
            cold = engine.complete(prompt)
            assert cold.tokens == right
            assert cold.tiers == {"computed": PROMPT_TOKENS}
            assert cold.usage.decision == "computed:absent"
            warm = engine.complete(prompt)
            assert warm.tokens == right
            assert warm.tiers["gpu"] >= FULL
            node.await_idle()
            for tier, dropped in (
                ("cpu", ()),
                ("ssd", ("cpu",)),
                ("remote", ("cpu", "ssd")),
            ):
                engine.forget()
                assert all(node.drop(*dropped).values()) if dropped else True
                again = engine.complete(prompt)
                assert again.tokens == right, tier
                assert again.tiers == {tier: FULL, "computed": rest}
                assert again.usage.decision == "loaded"
                status = node.await_idle()
                assert status["lookup_blocks"]["hit"][tier] == 5
                assert node.metric("kvtier_miss_blocks_total") == 0
            assert daemon.stop() == 0
        with node.daemon(), attached(loaded, node.socket) as engine:
            again = engine.complete(prompt)
            assert again.tokens == right
            tier = "ssd" if "ssd" in again.tiers else "remote"
            print(f"after the restart from {tier}")
            assert again.tiers == {tier: FULL, "computed": rest}


def test_a_restart_of_both_hits_in_the_ssd_tier(loaded: LoadedModel, node: RunningNode) -> None:
    prompt = prompt_of(2)
    with work_directory() as directory:
        other = RunningNode(directory)
        with other.daemon() as daemon, attached(loaded, other.socket) as engine:
            cold = engine.complete(prompt)
            other.await_idle()
            assert daemon.stop() == 0
        with other.daemon(), attached(loaded, other.socket) as engine:
            again = engine.complete(prompt)
            assert again.tokens == cold.tokens
            assert again.tiers == {"ssd": FULL, "computed": PROMPT_TOKENS - FULL}
            assert other.await_idle()["transfers"]["ssd_to_cpu"]["bytes"] == 5 * block_bytes(loaded)


def block_bytes(loaded: LoadedModel) -> int:
    per_token = loaded.num_layers * 2 * loaded.num_kv_heads * loaded.head_dim
    return BLOCK_TOKENS * per_token * loaded.dtype.itemsize


def test_a_longer_prompt_loads_what_it_shares(engine: AttachedEngine, node: RunningNode) -> None:
    short = prompt_of(3, 3 * BLOCK_TOKENS + 1)
    long = short + prompt_of(4, 2 * BLOCK_TOKENS)
    engine.complete(short)
    node.await_idle()
    engine.forget()
    answer = engine.complete(long)
    assert answer.tiers == {"cpu": 3 * BLOCK_TOKENS, "computed": 2 * BLOCK_TOKENS + 1}
    assert answer.usage.decision == "loaded_part:absent"


def test_the_last_token_is_always_computed(engine: AttachedEngine, node: RunningNode) -> None:
    prompt = prompt_of(5, 2 * BLOCK_TOKENS)
    cold = engine.complete(prompt)
    node.await_idle()
    engine.forget()
    again = engine.complete(prompt)
    assert again.tokens == cold.tokens
    assert again.usage.computed_tokens >= 1
    assert again.tiers.get("cpu", 0) in (BLOCK_TOKENS, 2 * BLOCK_TOKENS - 1)


def test_a_salt_separates(engine: AttachedEngine, node: RunningNode) -> None:
    prompt = prompt_of(6)
    first = engine.complete(prompt, cache_salt="alice")
    node.await_idle()
    for salt in ("bob", None):
        other = engine.complete(prompt, cache_salt=salt)
        assert other.tokens == first.tokens
        assert other.tiers == {"computed": PROMPT_TOKENS}, salt
    node.await_idle()
    engine.forget()
    assert engine.complete(prompt, cache_salt="alice").tiers["cpu"] == FULL
    assert node.await_idle()["tiers"]["cpu"]["blocks"] == 15, "three times the same prompt"


@pytest.mark.parametrize(("limit", "num_blocks"), [(0, 0), (63, 0), (64, 1), (200, 3), (10_000, 5)])
def test_max_offload_tokens_is_exact(
    engine: AttachedEngine, node: RunningNode, limit: int, num_blocks: int
) -> None:
    prompt = prompt_of(7)
    cold = engine.complete(prompt, max_offload_tokens=limit)
    tiers = node.await_idle()["tiers"]
    assert [tiers[name]["blocks"] for name in ("cpu", "ssd")] == [num_blocks] * 2
    assert tiers["cpu"]["tokens"] == num_blocks * BLOCK_TOKENS
    engine.forget()
    again = engine.complete(prompt, max_offload_tokens=limit)
    assert again.tokens == cold.tokens
    assert again.tiers.get("cpu", 0) == num_blocks * BLOCK_TOKENS


@pytest.mark.parametrize(("limit", "num_blocks"), [(0, 0), (63, 0), (64, 1), (200, 3), (10_000, 5)])
def test_max_load_tokens_is_exact(
    engine: AttachedEngine, node: RunningNode, limit: int, num_blocks: int
) -> None:
    prompt = prompt_of(8)
    cold = engine.complete(prompt)
    node.await_idle()
    engine.forget()
    again = engine.complete(prompt, max_load_tokens=limit)
    assert again.tokens == cold.tokens
    assert again.tiers.get("cpu", 0) == num_blocks * BLOCK_TOKENS
    if num_blocks < 5:
        assert "max_load_tokens" in again.usage.decision


def test_a_cancelled_request_leaves_nothing_held(engine: AttachedEngine, node: RunningNode) -> None:
    for seed in range(10, 16):
        pending = engine.submit(prompt_of(seed, 900), 100)
        assert pending.has_begun.wait(30)
        engine.runner.abort(pending.name)
        assert pending.has_ended.wait(10)
    engine.settle()
    assert engine.num_used() == 0, "the pool is free again"
    assert node.await_idle()["pins"] == 0


def test_equal_prompts_at_once_are_computed_once(engine: AttachedEngine, node: RunningNode) -> None:
    prompt = prompt_of(20)
    answers = [each.answer() for each in [engine.submit(prompt) for _ in range(6)]]
    assert len({answer.tokens for answer in answers}) == 1
    assert max(answer.usage.computed_tokens for answer in answers) == PROMPT_TOKENS
    assert sum(answer.usage.computed_tokens for answer in answers) < 2 * PROMPT_TOKENS
    engine.settle()
    node.await_idle()
    engine.forget()
    answers = [each.answer() for each in [engine.submit(prompt) for _ in range(6)]]
    assert len({answer.tokens for answer in answers}) == 1
    assert sum(answer.usage.tier_tokens[TierName.CPU] for answer in answers) == FULL, (
        "and loaded once"
    )


# Identity


def test_two_engines_of_one_model_share(
    engine: AttachedEngine, node: RunningNode, folder: Path, tmp_path: Path
) -> None:
    """Even where one has a copy of it under another name."""
    prompt = prompt_of(30)
    cold = engine.complete(prompt)
    node.await_idle()
    copy = shutil.copytree(folder, tmp_path / "another name")
    with attached(load_model(copy), node.socket) as other:
        again = other.complete(prompt)
        assert again.tokens == cold.tokens
        assert again.tiers == {"cpu": FULL, "computed": PROMPT_TOKENS - FULL}
        assert len(node.stat()["engines"]) == 2


def change_one_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the last value of the last tensor: its sign and exponent's top
    file.write_bytes(content)


def change_rope(folder: Path) -> None:
    file = folder / "config.json"
    text = file.read_text()
    assert '"rope_theta": 10000.0' in text
    file.write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))


@pytest.mark.parametrize("change", [change_one_weight, change_rope], ids=["weight", "rope"])
def test_a_model_changed_in_place_never_hits(
    engine: AttachedEngine, node: RunningNode, folder: Path, tmp_path: Path, change: object
) -> None:
    assert callable(change)
    prompt = prompt_of(31)
    engine.complete(prompt)
    node.await_idle()
    changed = shutil.copytree(folder, tmp_path / "tiny")
    change(changed)
    with attached(load_model(changed), node.socket) as other:
        assert other.complete(prompt).tiers == {"computed": PROMPT_TOKENS}
        node.await_idle()
        other.forget()
        assert other.complete(prompt).tiers["cpu"] == FULL, "its own blocks it finds"


def test_another_dtype_never_hits(engine: AttachedEngine, node: RunningNode, folder: Path) -> None:
    prompt = prompt_of(32)
    engine.complete(prompt)
    node.await_idle()
    with attached(load_model(folder, dtype="bfloat16"), node.socket) as other:
        assert other.complete(prompt).tiers == {"computed": PROMPT_TOKENS}


def test_another_model_type_never_hits(
    engine: AttachedEngine, node: RunningNode, tmp_path: Path
) -> None:
    prompt = prompt_of(33)
    engine.complete(prompt)
    node.await_idle()
    with attached(load_tiny(tmp_path / "other", "qwen2"), node.socket) as other:
        assert other.complete(prompt).tiers == {"computed": PROMPT_TOKENS}
