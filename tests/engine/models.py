"""Tiny random models, and what transformers itself makes of them."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from kvtier.engine.model import LoadedModel, load_model
from kvtier.engine.support import ARCHITECTURES

VOCAB = 256
CONTEXT = 1024


def tiny_config(model_type: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        # Large weights spread the scores: greedy choices then do not hang on rounding.
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if model_type == "mistral":
        fields["sliding_window"] = None
    return transformers.AutoConfig.for_model(model_type, **(fields | changes))


def save_tiny(folder: Path, model_type: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """Write a model folder as the Hub would have it."""
    config = tiny_config(model_type, **changes)
    torch.manual_seed(seed)
    model = getattr(transformers, ARCHITECTURES[model_type])(config)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    for symbol in sorted(alphabet)[: VOCAB - 3]:
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(folder)


def load_tiny(folder: Path, model_type: str = "llama", **changes: Any) -> LoadedModel:
    return load_model(save_tiny(folder, model_type, **changes))


class Reference:
    """transformers' own attention and ``generate`` over the very same weights."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = copy.deepcopy(loaded.model)
        self._model.set_attn_implementation("sdpa")
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        known = self._known.get((prompt, num_tokens))
        if known is None:
            ids = torch.tensor([prompt])
            with warnings.catch_warnings(), torch.inference_mode():
                warnings.simplefilter("ignore")  # generate's advice about its own settings
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                )
            known = self._known[prompt, num_tokens] = out[0, len(prompt) :].tolist()
        return known

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits
        assert isinstance(logits, torch.Tensor)
        return logits

    def perplexity(self, tokens: tuple[int, ...]) -> float:
        ids = torch.tensor([tokens])
        loss = torch.nn.functional.cross_entropy(self.logits(ids[:, :-1])[0], ids[0, 1:])
        return float(loss.exp())
