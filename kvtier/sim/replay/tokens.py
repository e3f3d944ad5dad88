"""From text to tokens: a given tokenizer, or pieces of four bytes where there is none."""

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.errors import StartError

__all__ = ["PSEUDO_NOTE", "Tokenizer", "load_tokenizer", "pseudo_tokens"]

Tokenizer = Callable[[str], Sequence[int]]
"""Turns a text into token ids. What is alike at the beginning gives ids alike at the beginning."""

PSEUDO_NOTE = (
    "no tokenizer was given: each four bytes of text count as a token, which is about right for "
    "English; --tokenizer takes a tokenizer.json"
)


def pseudo_tokens(text: str) -> Sequence[int]:
    """Cut text into pieces of four bytes, each a token; prefixes stay prefixes, piece by piece."""
    content = text.encode("utf-8", "surrogatepass")
    return array("I", content.ljust(-(-len(content) // 4) * 4, b"\0"))


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or the pseudo one for None."""
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
    except Exception as error:  # tokenizers raises plain Exception for what it cannot read
        raise StartError("--tokenizer", f"{path}: {error}", "give a tokenizer.json") from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
