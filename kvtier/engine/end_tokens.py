"""The tokens that end an answer.

The end-of-sequence token is not enough: many models end their turn in a chat with another token,
which different files name in different places. Without it an answer runs on into invented turns.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["end_tokens"]

_NAMES = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of sequence, of turn and of message."""

_ANSWER = "kvtier-answer"
"""Placeholder for an answer, to find out what the chat template writes after it."""


def end_tokens(path: Path, model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens that a model's files, tokenizer and chat template name."""
    found = set(_chat_end_tokens(tokenizer))
    for source in (model.generation_config, model.config, tokenizer):
        for name in _NAMES:
            ids = getattr(source, name, None)
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if path.is_file():
        found.update(_gguf_end_tokens(path))
    return frozenset(found)


def _gguf_end_tokens(path: Path) -> Iterable[int]:
    """Return the end tokens of a GGUF file; transformers only reads the end of sequence."""
    import gguf

    fields = gguf.GGUFReader(str(path)).fields
    named = [fields.get(f"tokenizer.ggml.{name}") for name in _NAMES]
    return [int(field.contents()) for field in named if field is not None]


def _chat_end_tokens(tokenizer: Any) -> Iterable[int]:
    """Return the token that follows an assistant message in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return []
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": "-"},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program, and may fail in any way
        return []
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    tokens = tokenizer.added_tokens_decoder.items()
    # One token may be the prefix of another: <|end|> and <|end|>x.
    matching = [(len(token.content), i) for i, token in tokens if after.startswith(token.content)]
    return [max(matching)[1]] if matching else []
