"""Lines of a trace with checked access to their fields, and tokenizers for their text."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.errors import StartError

__all__ = ["PSEUDO_NOTE", "YEARS_S", "Tokenizer", "TraceLine", "load_tokenizer", "pseudo_tokens"]


_TOKENS_MAX = 2**24
"""Largest prompt: sixteen times the longest context that exists; more is a mistake."""
YEARS_S = 4e9
"""Latest time: the year 2096 if times count from 1970."""


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A line and its position. ``fields`` is empty unless it is a JSON object."""

    path: Path
    number: int
    text: str
    fields: Mapping[str, Any]

    def error(self, field: str, problem: str, remedy: str) -> StartError:
        """Return the error that rejects this line or one of its fields."""
        where = f"{self.path}:{self.number}"
        return StartError(f"{where}: {field}" if field else where, problem, remedy)

    def count(self, field: str, default: int | None = None) -> int:
        """Return a number of tokens."""
        value = self._value(field, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _TOKENS_MAX:
            raise self.error(field, f"{_short(value)} is not a number of tokens", "give a count")
        return value

    def time_ns(self, field: str, unit_ns: int) -> int:
        """Return a time, with any origin."""
        value = self._value(field, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value * unit_ns <= YEARS_S * 1e9:
            raise self.error(field, f"{_short(value)} is not a time", "give a positive number")
        return value * unit_ns if isinstance(value, int) else round(value * unit_ns)

    def number_of(self, field: str, least: float, most: float) -> float | None:
        """Return a number within bounds; None if it is missing."""
        value = self.fields.get(field)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise self.error(
                field, f"{_short(value)} is not a number", f"give {least:g} to {most:g}"
            )
        return float(value)

    def text_of(self, field: str, default: str | None = None) -> str:
        """Return a text."""
        value = self._value(field, default)
        if not isinstance(value, str):
            raise self.error(field, f"{_short(value)} is not text", "give it in quotes")
        # Cut text may end in half of a surrogate pair, which cannot be encoded.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()

    def ids(self, field: str) -> list[int | str]:
        """Return a list of ids, whole numbers or words."""
        value = self._value(field, None)
        if not isinstance(value, list) or not {type(each) for each in value} <= {int, str}:
            raise self.error(
                field, f"{_short(value)} is not a list of ids", "give numbers or words"
            )
        return value

    def tokens(self, field: str) -> list[int]:
        """Return a list of token ids."""
        value = self._value(field, None)
        if not isinstance(value, list) or not {type(each) for each in value} <= {int}:
            raise self.error(field, f"{_short(value)} is not a list of token ids", "give numbers")
        if value and (min(value) < 0 or max(value) >= 2**32):
            raise self.error(field, "has an invalid token id", "give ids from 0 to 2**32 - 1")
        return value

    def _value(self, field: str, default: object) -> Any:
        value = self.fields.get(field, default)
        if value is None:
            raise self.error(field, "is missing", "each line needs it")
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


Tokenizer = Callable[[str], Sequence[int]]
"""Turns a text into token ids. Texts with a common prefix get ids with a common prefix."""

PSEUDO_NOTE = (
    "no tokenizer given: every four bytes of text count as a token, which is about right for "
    "English; see --tokenizer"
)


def pseudo_tokens(text: str) -> Sequence[int]:
    """Split text into tokens of four bytes each; common prefixes stay common."""
    content = text.encode("utf-8", "surrogatepass")
    return array("I", content.ljust(-(-len(content) // 4) * 4, b"\0"))


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or ``pseudo_tokens`` for None."""
    if path is None:
        return pseudo_tokens
    try:
        import tokenizers
    except ImportError:
        raise StartError(
            "--tokenizer", "needs the tokenizers package", "pip install 'kvtier[engine]'"
        ) from None
    try:
        content = path.read_text()
        tokenizer = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # tokenizers raises plain Exception for unreadable files
        raise StartError("--tokenizer", f"{path}: {error}", "give a tokenizer.json") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
