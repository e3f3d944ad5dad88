"""A model's text side without a model: every byte is a token."""

__all__ = ["ByteChatModel"]

_END = 256
"""The only special token, which ends an answer and has no text."""


class ByteChatModel:
    """Tokens 0 to 255 are bytes of UTF-8, so that characters are split as often as can be."""

    def __init__(self, model_id: str = "byte-model", context_limit: int = 2048) -> None:
        self.model_id = model_id
        self.context_limit = context_limit
        self.vocab_size = _END + 1
        self.eos_ids = frozenset({_END})
        self.special_tokens = {"<end>": _END}
        self.token_characters_max = 1

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of the bytes, without a leading space, like SentencePiece.

        Bytes that are not valid UTF-8 become U+FFFD.
        """
        text = bytes(token for token in ids if token != _END).decode(errors="replace")
        return text.removeprefix(" ")

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Return one line per message; like many templates, refuses roles it does not know."""
        for message in messages:
            if message["role"] not in {"system", "user", "assistant"}:
                raise ValueError(f"unknown role {message['role']}")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")
