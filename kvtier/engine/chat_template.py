"""A model's chat template: prompts from conversations, and the tokens that end an answer.

Theory
------
A template renders a conversation to one text, in which special tokens such as ``<|im_end|>`` mark
where a message ends and who speaks next. A tokenizer cannot distinguish the template's own
``<|im_end|>`` from one that a message spells out, so a message could end its turn and begin another
one in a different role.

Before rendering, a *guard*, a character that no message contains, is inserted into every special
token that a message spells out: ``<`` guard ``|im_end|>`` matches no special token. The prompt is
tokenized as a whole, and the tokens of the guards are dropped. So the text around a guard keeps its
tokens, and a conversation that spells out no special token has no guards at all.

The *outline* is the conversation rendered with a placeholder for each text. It shows which texts
the template leaves out, and how many special tokens the template itself writes.

Newer releases of transformers have ``sanitize_control_tokens`` for this. It tokenizes piece by
piece, drops some private-use characters, and treats the ``<think>`` of earlier answers as text, so
the prompt would differ from the cached one.

An answer ends with the end-of-sequence token, or with another token: many models end their turn in
a chat with one that different files name in different places. Without it an answer runs on into
invented turns.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["ChatTemplate", "MessageRefused", "end_tokens"]

_Messages = Sequence[dict[str, str]]

_COMMON_ROLES = frozenset({"system", "user", "assistant"})
"""Roles that are always passed to the template, which renders them or raises its own error."""

_NO_ROLE = "kvtiernorole"
"""A role that no chat template supports."""

_REMEDIES: Mapping[str, str] = {
    "content": "send this text in another message",
    "name": "omit it or put it into the content",
}
"""Fields of a message that the model must see, and the remedy if a template omits one."""

_PLACEHOLDER = re.compile(r"kvtier(\d+)(content|name)")
"""Only letters and digits, so that trimming, JSON and tokenization leave it as it is."""

_GUARDS: Sequence[str] = [chr(code) for code in range(0x10FFFF, 0x10FFBF, -1)]
"""Noncharacters and the end of the last private-use plane: no vocabulary merges their bytes."""


class MessageRefused(ValueError):
    """A message that the model would not see as it was sent; ``param`` is its path."""

    def __init__(self, param: str, problem: str, remedy: str) -> None:
        super().__init__(f"{param}: {problem}; {remedy}")
        self.param = param


class ChatTemplate:
    """The chat template of a tokenizer. Like the tokenizer, it is not thread-safe."""

    def __init__(self, tokenizer: Any, *, parses_special: bool = False) -> None:
        """Raise ValueError if the tokenizer has no chat template."""
        source = tokenizer.get_chat_template()
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        special.update(tokenizer.all_special_tokens)
        # Tokens such as <tool_response>. Models write some of these (<think>), so they are kept in
        # earlier answers, and also in system and user messages, which explain how to use them.
        markup = {token.content for token in added if token.content in source}
        self._tokenizer = tokenizer
        self._parses_special = parses_special
        self._special = _first_characters(special)
        self._markup = _first_characters(special | {token for token in markup if token.strip()})
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        is_normalized = any(token.special and token.normalized for token in added)
        self._normalizer = backend.normalizer if backend and is_normalized else None

    def encode(self, messages: _Messages) -> list[int]:
        """Return the prompt that asks the model for the next message.

        Raises MessageRefused for a message that the model would not see as it was sent, and
        ValueError if the template refuses the conversation or fails on it.
        """
        messages = self._with_known_roles(messages)
        outline = self._render(_with_placeholders(messages))
        _check_shown(messages, outline)
        if self._parses_special:
            return self._tokenize(self._render(messages))
        guard = _guard_for(messages)
        guarded = [self._guarded(*each, guard) for each in enumerate(messages)]
        prompt = self._render(guarded)
        if self._num_special(prompt) > self._num_special(outline):
            raise _unprotected("messages", "form a special token together with the chat template")
        return self._tokenize_guarded(prompt, guard) if guard in prompt else self._tokenize(prompt)

    @property
    def marks_turns(self) -> bool:
        """Return whether messages are separated by special tokens, which no message can imitate."""
        turns = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
        outline = self._attempt(_with_placeholders(turns))
        return all(
            self._special.search(outline, before.end(), after.start())
            for before, after in pairwise(_PLACEHOLDER.finditer(outline))
        )

    def _with_known_roles(self, messages: _Messages) -> _Messages:
        """Return the messages with ``developer`` as ``system`` if the template lacks that role."""
        for role in dict.fromkeys(message["role"] for message in messages):
            if role in _COMMON_ROLES or self._knows(role, messages):
                continue
            if role != "developer":
                index = [message["role"] for message in messages].index(role)
                raise MessageRefused(
                    f"messages[{index}].role",
                    f"this model's chat template has no role {role[:32]!r}",
                    "use system, user or assistant",
                )
            messages = _with_role(messages, role, "system")
        return messages

    def _knows(self, role: str, messages: _Messages) -> bool:
        """Return whether the template renders a role differently from one that does not exist."""
        outline = _with_placeholders(messages)
        known = self._attempt(outline).lower()
        unknown = self._attempt(_with_role(outline, role, _NO_ROLE)).lower()
        return known != unknown.replace(_NO_ROLE, role.lower())

    def _guarded(self, index: int, message: dict[str, str], guard: str) -> dict[str, str]:
        """Return a message with guards in its special tokens. Raises MessageRefused."""
        spelled = self._special if message["role"] in _COMMON_ROLES else self._markup
        guarded = dict(message)
        for field, text in message.items():
            if field == "role" or text is None:
                continue
            guarded[field] = spelled.sub(rf"\g<0>{guard}", text)
            normalize = self._normalizer.normalize_str if self._normalizer else str
            if spelled.search(normalize(guarded[field])):
                raise _unprotected(f"messages[{index}].{field}", "spells out a special token")
        return guarded

    def _render(self, messages: _Messages) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs and may raise anything
            raise ValueError(f"the chat template refused the messages: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _attempt(self, messages: _Messages) -> str:
        """Return the rendered messages, or the template's error if it refuses them."""
        try:
            return self._render(messages)
        except ValueError as error:
            return str(error)

    def _num_special(self, text: str) -> int:
        return len(self._special.findall(text))

    def _tokenize(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt, add_special_tokens=False))

    def _tokenize_guarded(self, prompt: str, guard: str) -> list[int]:
        """Return the tokens of a prompt without those of its guards."""
        if not self._tokenizer.is_fast:  # other tokenizers do not return the text of each token
            raise _unprotected("messages", "spell out a special token")
        encoded = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        texts = [prompt[start:end] for start, end in encoded["offset_mapping"]]
        if any(guard in text and text != guard for text in texts):
            raise _unprotected("messages", "spell out a special token")
        tokens = zip(encoded["input_ids"], texts, strict=True)
        return [token_id for token_id, text in tokens if text != guard]


def _first_characters(tokens: Collection[str]) -> re.Pattern[str]:
    """Return a pattern for the first character of each token in a text, even if tokens overlap."""
    by_first: dict[str, list[str]] = {}
    for token in sorted(tokens):
        by_first.setdefault(token[0], []).append(re.escape(token[1:]))
    # One lookahead for all tokens with the same first character: models reserve hundreds of them.
    choices = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in by_first.items())
    return re.compile("|".join(choices) or "(?!)")


def _with_role(messages: _Messages, role: str, other: str) -> _Messages:
    return [m | {"role": other} if m["role"] == role else m for m in messages]


def _text_fields(message: dict[str, str]) -> list[str]:
    """Return the fields of a message that are not blank."""
    return [field for field in _REMEDIES if (message.get(field) or "").strip()]


def _with_placeholders(messages: _Messages) -> _Messages:
    return [
        message | {field: f"kvtier{index}{field}" for field in _text_fields(message)}
        for index, message in enumerate(messages)
    ]


def _check_shown(messages: _Messages, outline: str) -> None:
    """Raise MessageRefused for the first text that the template leaves out."""
    shown = set(_PLACEHOLDER.findall(outline))
    for index, message in enumerate(messages):
        for field in _text_fields(message):
            if (str(index), field) not in shown and "tool_calls" not in message:
                raise MessageRefused(
                    f"messages[{index}].{field}",
                    f"this model's chat template leaves out the {field} of a message with the role "
                    f"{message['role'][:32]!r} at this position",
                    _REMEDIES[field],
                )


def _guard_for(messages: _Messages) -> str:
    """Return a character that none of the messages contains. Raises MessageRefused."""
    texts = [text for message in messages for text in message.values() if text is not None]
    for guard in _GUARDS:
        if not any(guard in text for text in texts):
            return guard
    raise _unprotected("messages", "contain every character that could serve as a guard")


def _unprotected(param: str, problem: str) -> MessageRefused:
    return MessageRefused(
        param,
        f"{problem}, which this model's tokenizer cannot treat as plain text",
        "change the text or set engine.parse_special_in_messages",
    )


_NAMES = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of sequence, of turn and of message."""

_ANSWER = "kvtier-answer"
"""Placeholder for an answer, to find what the chat template writes after it."""


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
    """Return the token that follows an assistant message in the chat template, if any."""
    if not tokenizer.chat_template:
        return []
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": "-"},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates are programs and may fail in any way
        return []
    after = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
    tokens = tokenizer.added_tokens_decoder.items()
    # One token may be the prefix of another: <|end|> and <|end|>x.
    matching = [(len(token.content), i) for i, token in tokens if after.startswith(token.content)]
    return [max(matching)[1]] if matching else []
