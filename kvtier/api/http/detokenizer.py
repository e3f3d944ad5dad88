"""Incremental detokenization: token ids to text as they are generated, up to a stop string.

Theory
------
The text of an answer is ``decode(prompt + answer)`` without the prefix that it shares with
``decode(prompt)``. It is not ``decode(answer)``: SentencePiece decoders strip the space at the
start of a text, so an answer that is decoded alone loses the space before its first word.

Each step decodes a short window of tokens that begins before the new ones, and returns the text
that the new ones add. The first window begins with the last tokens of the prompt. A token holds
bytes, not characters: while the text ends with U+FFFD, its last character may still be incomplete
and is held back.

The window moves on whenever the text ends with a complete character. Invalid UTF-8 never does, so
after ``_WINDOW_TOKENS`` the window moves anyway, which bounds the cost of each token.

Limits
------
Byte-fallback decoders replace every byte of a run with U+FFFD if one of them is invalid. Characters
of that run that were already returned stay as they are.
"""

from collections.abc import Callable, Sequence

__all__ = [
    "Detokenizer",
    "StopFinder",
    "continuation",
]

_BROKEN = "\N{REPLACEMENT CHARACTER}"

_WINDOW_TOKENS = 32
"""Real text ends with a complete character every few tokens; 32 tokens without one are garbage."""

_CONTEXT_TOKENS = 8
"""A character has at most four bytes, and so four tokens; twice that keeps it in the window."""

_PROMPT_TOKENS_MAX = 256
"""How far to look back in a prompt for text; prompts do not end with more special tokens."""

_Decode = Callable[[list[int]], str]


class Detokenizer:
    """The text of one completion. Never returns half a character."""

    def __init__(self, decode: _Decode, prompt: Sequence[int] = ()) -> None:
        """Start after ``prompt``, whose own text is not returned."""
        self._decode = decode
        self._window = _prompt_end(decode, prompt)
        self._num_context = len(self._window)
        """Leading tokens of the window that the next window does not need."""
        self._given = decode(self._window)
        """Leading part of the window's text that was already returned, or is the prompt's."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the text that is now certain.

        The result does not depend on how tokens are grouped into calls: they are decoded one at a
        time, because only that shows where a character ends.
        """
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the text that is still held back at the end of the answer, complete or not."""
        text = self._decode(self._window)
        piece = text[_num_common(self._given, text) :]
        self._given = text
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        start = _num_common(self._given, text)
        certain = text.rstrip(_BROKEN)
        is_clean = len(certain) == len(text)
        is_long = len(self._window) - self._num_context > _WINDOW_TOKENS
        if not is_clean and is_long:
            certain = text[:-1]  # only the last broken character can still be completed
        piece = certain[start:]
        if piece:
            if start < len(self._given):  # it completes the prompt's last character
                self._num_context = 0
            self._given = certain
        if is_clean and piece:
            self._move(self._num_context, num_held=0)
        elif is_clean and self._given:
            self._window.pop()  # special tokens have no text and would push the context out
        elif is_long:
            self._move(len(self._window) - _CONTEXT_TOKENS, num_held=len(text) - len(certain))
        return piece

    def _move(self, first: int, num_held: int) -> None:
        """Drop the tokens before ``first``; the last ``num_held`` characters stay held back."""
        del self._window[:first]
        self._num_context = len(self._window)
        text = self._decode(self._window)
        self._given = text[: len(text) - num_held]


def continuation(decode: _Decode, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of tokens that follow a prompt."""
    detokenizer = Detokenizer(decode, prompt)
    return detokenizer.push(token_ids) + detokenizer.flush()


def _num_common(given: str, text: str) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(given), len(text))
    while given[:length] != text[:length]:
        length -= 1
    return length


def _prompt_end(decode: _Decode, prompt: Sequence[int]) -> list[int]:
    """Return enough of a prompt's last tokens that they decode as they do in the whole prompt.

    They must have text, or the decoder treats what follows as the start of a text. They must not
    begin inside a character, or a byte-fallback decoder also breaks the characters after it.
    """
    length = _CONTEXT_TOKENS
    longest = min(len(prompt), _PROMPT_TOKENS_MAX)
    while length < longest and decode(list(prompt[-length:]))[:1] in {"", _BROKEN}:
        length += max(1, length // _CONTEXT_TOKENS)
    return list(prompt[-length:])


class StopFinder:
    """Cuts a text before the first stop string, however the text is split.

    The stop string that ends first wins, and of several the longest. Text that could be the start
    of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def push(self, text: str) -> str:
        """Add text, and return the text that cannot be part of a stop string."""
        assert not self.is_found, "no text counts after a stop"
        text = self._held + text
        start = self._first_stop(text)
        if start is not None:
            self.is_found = True
            self._held = ""
            return text[:start]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the held-back text at the end."""
        text, self._held = self._held, ""
        return text

    def _first_stop(self, text: str) -> int | None:
        found = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(found)[1] if found else None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a start of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
