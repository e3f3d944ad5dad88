"""Create a model directory that vLLM can serve, without downloads; for tests and experiments.

    python scripts/vllm_model.py tiny FOLDER [SEED]
    python scripts/vllm_model.py mla FOLDER
    python scripts/vllm_model.py gguf FILE.gguf FOLDER

``tiny`` is a Llama with random weights that depend only on the seed, and one token per byte of
text. ``mla`` is the same as a DeepSeek-V2, which has multi-head latent attention. ``gguf`` is the
model in the file, converted to float32, because vLLM does not read such files.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from kvtier.engine.model import load_model

_CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def make_tiny(folder: Path, *, seed: int = 0, num_layers: int = 4) -> None:
    """Write a Llama with random weights, and a tokenizer of bytes, to ``folder``."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.15,  # so that answers differ and do not repeat a single token
        dtype=torch.float32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)


def make_mla(folder: Path) -> None:
    """Write a DeepSeek-V2 with random weights, and a tokenizer of bytes, to ``folder``."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=384,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,  # the kernel for CPUs supports only these two sizes
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        first_k_dense_replace=3,  # no layers with experts, which are not tested
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.15,
        dtype=torch.float32,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise, bos_token="<s>", eos_token="</s>", chat_template=_CHAT
    )
    tokenizer.save_pretrained(folder)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to ``folder``."""
    loaded = load_model(file, dtype="float32")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)


def main(words: list[str]) -> None:
    """Run the command line."""
    match words:
        case ["tiny", folder]:
            make_tiny(Path(folder))
        case ["mla", folder]:
            make_mla(Path(folder))
        case ["tiny", folder, seed]:
            make_tiny(Path(folder), seed=int(seed))
        case ["gguf", file, folder]:
            convert_gguf(Path(file), Path(folder))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
