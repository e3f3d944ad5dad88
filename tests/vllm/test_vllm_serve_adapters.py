"""A real ``vllm serve`` with LoRA adapters: blocks are shared by content, and by nothing else."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvtier.testing.child import work_directory
from kvtier.testing.running_node import RunningNode
from kvtier.testing.vllm_server import VllmServer
from tests.vllm.servers import RELEASES, STARTED, Answer, ask, await_stored, prompt, running

pytestmark = [*STARTED, pytest.mark.skipif(not RELEASES, reason="make test-vllm runs it")]

RANK, HIDDEN, KEYS = 8, 256, 128


def save_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter for the tiny model that changes its answers."""
    folder.mkdir(exist_ok=True)
    make = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=make)
        tensors[f"{name}.lora_B.weight"] = torch.randn(KEYS, RANK, generator=make)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj"]}'
    )
    return folder


@pytest.fixture
def adapted(start: Callable[..., VllmServer], tmp_path: Path) -> Iterator[VllmServer]:
    folders = {name: save_adapter(tmp_path / name, seed) for name, seed in ADAPTERS.items()}
    modules = [f"{name}={folder}" for name, folder in folders.items()]
    with work_directory() as directory:
        flags = {"max_lora_rank": RANK, "max_loras": 2, "lora_modules": modules}
        with start(RELEASES[0], "tiny", directory, enable_lora=True, **flags) as server:
            yield server.await_ready()


ADAPTERS = {"one": 1, "copy": 1, "two": 2}


def test_adapters_share_blocks_by_content(adapted: VllmServer, tmp_path: Path) -> None:
    served = RunningNode(tmp_path, {"daemon.socket": str(adapted.child.log_path.parent / "k.sock")})
    asked = prompt(90)
    with running(served):
        plain = adapted.ask(asked)
        await_stored(served, 4, "cpu")
        one = ask(adapted, served, asked, model="one")
        assert one == Answer(one.tokens), "nothing of the plain model's"
        assert one.tokens != plain
        await_stored(served, 8, "cpu")
        assert ask(adapted, served, asked, model="copy") == Answer(
            one.tokens, 512, frozenset({"cpu"})
        )
        two = ask(adapted, served, asked, model="two")
        assert two == Answer(two.tokens)
        assert two.tokens not in (one.tokens, plain)
        await_stored(served, 12, "cpu")
        # vLLM keeps two, so that it reads the first one again, and it is another one by now.
        save_adapter(tmp_path / "one", 3)
        changed = ask(adapted, served, asked, model="one")
        assert changed == Answer(changed.tokens)
        assert changed.tokens != one.tokens
        assert "an adapter is not cached" in adapted.child.log
        await_stored(served, 12, "cpu")
        assert ask(adapted, served, asked) == Answer(plain, 512, frozenset({"cpu"}))
