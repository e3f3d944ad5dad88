"""Small tokenizers and chat templates that are built like those of well-known model families."""

import json
import string
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"

CHATML = """\
{%- for message in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message['content'] | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}
{%- else %}
{%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{%- if loop.last and system_message is defined %}
{{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
{%- else %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- endif %}
{%- else %}
{{- ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

BARE = """\
{%- for message in messages %}
{%- if message.role != 'system' %}{{ message.content }}{% endif %}
{%- endfor %}{{ eos_token }}"""
"""A template without a separator between messages, and without system messages."""

NAMED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.name %}{{ ' name=' + message.name }}{% endif %}
{{- '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""


def _finished(
    tokenizer: Tokenizer, template: str, *tokens: str | AddedToken, **special: str
) -> Any:
    tokenizer.add_special_tokens([each for each in tokens if isinstance(each, str)])
    tokenizer.add_tokens([each for each in tokens if isinstance(each, AddedToken)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = template
    return fast


def _byte_level(split: str | None = None) -> Tokenizer:
    """Return a byte-level BPE trained on English; ``split`` is the regex of newer families."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = (
        byte_level
        if split is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), byte_level])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train([str(TEXT)], trainer)
    return tokenizer


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece(*specials: str, is_legacy: bool) -> Tokenizer:
    """Return a BPE like SentencePiece's, with ▁ for spaces and bytes for unknown characters."""
    learning = Tokenizer(models.BPE(unk_token="<unk>"))
    learning.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(
        vocab_size=1100, show_progress=False, special_tokens=[*specials, *_BYTES]
    )
    learning.train([str(TEXT)], trainer)
    learned = _model(learning)
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(learned["vocab"], merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = _spaces_and_bytes()
    return tokenizer


def _spaces_and_bytes() -> Any:
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("▁", " ")
    return decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])


def _model(tokenizer: Tokenizer) -> Any:
    return json.loads(tokenizer.to_str())["model"]


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _markup(*contents: str) -> list[AddedToken]:
    return [AddedToken(content, special=False, normalized=False) for content in contents]


def chatml() -> Any:
    return _finished(_byte_level(), CHATML, *_CHATML_TOKENS, eos_token="<|im_end|>")


def qwen3() -> Any:
    tokenizer = _byte_level(_LLAMA3_SPLIT)
    tokenizer.normalizer = normalizers.NFC()
    markup = _markup("<think>", "</think>", "<tool_response>", "</tool_response>", "<table>")
    return _finished(tokenizer, QWEN3, *_CHATML_TOKENS, *markup, eos_token="<|im_end|>")


def llama3() -> Any:
    tokens = (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        *(f"<|reserved_special_token_{number}|>" for number in range(240)),
    )
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return _finished(_byte_level(_LLAMA3_SPLIT), LLAMA3, *tokens, **special)


def mistral() -> Any:
    """A tokenizer whose special tokens mark turns, as in Mistral since version 3."""
    tokens = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _finished(_sentencepiece(*tokens, is_legacy=False), MISTRAL, *tokens, **special)


def llama2() -> Any:
    """A tokenizer whose turns are marked by text, as in Llama 2 and the first Mistral."""
    tokens = ("<unk>", "<s>", "</s>")
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _finished(_sentencepiece(*tokens, is_legacy=True), MISTRAL, *tokens, **special)


def gemma() -> Any:
    tokens = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    tokenizer = _sentencepiece(*tokens, is_legacy=False)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    markup = _markup("\n", "\n\n", "▁▁", "<table>")
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return _finished(tokenizer, GEMMA, *tokens, *markup, **special)


def unigram() -> Any:
    """Return a tokenizer with ``</s>`` in its model, not only among its added tokens."""
    tokens = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    learning = Tokenizer(models.Unigram())
    learning.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=500,
        show_progress=False,
        unk_token="<unk>",
        special_tokens=[*tokens, *_BYTES],
        initial_alphabet=list(string.printable),
    )
    learning.train([str(TEXT)], trainer)
    pieces = [tuple(piece) for piece in _model(learning)["vocab"]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = learning.pre_tokenizer
    tokenizer.decoder = _spaces_and_bytes()
    return _finished(tokenizer, CHATML, *tokens, eos_token="</s>", unk_token="<unk>")


def normalized() -> Any:
    """A tokenizer that finds special tokens in normalized text, where ＜|im_end|＞ is one too."""
    tokenizer = _byte_level()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=True) for each in _CHATML_TOKENS]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=AddedToken("<|im_end|>", special=True, normalized=True),
    )
    fast.chat_template = CHATML
    return fast


FAMILIES: Mapping[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (chatml, qwen3, llama3, mistral, llama2, gemma, unigram, normalized)
}


@cache
def family(name: str, template: str | None = None) -> Any:
    """Return a family's tokenizer, created once, with ``template`` instead of its own if given."""
    tokenizer = FAMILIES[name]()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer
