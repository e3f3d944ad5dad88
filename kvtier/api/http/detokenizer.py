"""Tokens to text, as they come.

Theory
------
A token is a piece of bytes, not of text: a character may be spread over several, and some
tokenizers look at the token before (SentencePiece drops a leading space). So each step decodes a
short window that begins before the new tokens, and gives out what is longer than last time. While
the text ends with U+FFFD its end may still become a character, and is held back.

The window moves on whenever the text ends clean, which bounds it for text. Garbage never ends
clean, so after ``_WINDOW_TOKENS`` the window moves anyway: output stays linear in its length.
"""

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"

_WINDOW_TOKENS = 32
"""Real text ends clean every few tokens; this many in a row without is garbage."""

_CONTEXT_TOKENS = 8
"""A character is at most four bytes, thus four tokens; twice that leaves it whole in the window."""


class Detokenizer:
    """The text of one completion. Never gives out half a character."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_context = 0
        """Leading tokens of the window whose text has all been given out."""
        self._num_given = 0
        """Leading characters of the window's text that have been given out."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens and return the text that is now certain; how they are cut up is all one.

        One by one: where a character ends can only be seen there.
        """
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return what was held back, broken or not: no more tokens come."""
        piece = self._decode(self._window)[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(_BROKEN)
        is_clean = len(certain) == len(text)
        if not is_clean and len(self._window) > _WINDOW_TOKENS:
            certain = text[:-1]  # only the last broken character can still become whole
        piece = certain[self._num_given :]
        self._num_given = max(self._num_given, len(certain))
        if is_clean and piece:
            self._move(self._num_context, num_held=0)
        elif len(self._window) > _WINDOW_TOKENS:
            self._move(len(self._window) - _CONTEXT_TOKENS, num_held=len(text) - len(certain))
        return piece

    def _move(self, first: int, num_held: int) -> None:
        """Forget the tokens before ``first``; the last ``num_held`` characters are not given."""
        del self._window[:first]
        self._num_context = len(self._window)
        self._num_given = max(0, len(self._decode(self._window)) - num_held)
