"""How long a simulated engine computes: a floor, a term by token, and one by attention."""

import csv
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.core.cost.sample import StepSample
from kvtier.errors import StartError

__all__ = ["PrefillModel", "fit_profile"]

_SMALL_TOKENS = 32
"""Batches up to here take as long as reading the weights, however small they are."""
_LARGE_TOKENS = 1024
"""Batches from here on take a time for each token."""

_NUMBER_MAX = 1e12
"""Neither a width nor milliseconds come near."""


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """``max(floor, token * new) + attended * new * (past + new / 2)``.

    The defaults are an 8B model on an A100.
    """

    floor_s: float = 0.010
    token_s: float = 67e-6
    attended_s: float = 67e-6 / 30_000

    def seconds(self, num_new: int, num_past: int) -> float:
        """Return what computing so many tokens behind others takes; nothing for none."""
        if num_new <= 0:
            return 0.0
        attended = num_new * (num_past + num_new / 2)
        return max(self.floor_s, self.token_s * num_new) + self.attended_s * attended

    def sample(self, num_new: int, num_past: int) -> StepSample:
        """Return the step that an engine would report."""
        attended = num_new * (num_past + num_new / 2)
        return StepSample(num_new, 0, attended, 0, self.seconds(num_new, num_past))


@dataclass(frozen=True, slots=True)
class _Row:
    num_tokens: int
    layer_s: float
    embedding_s: float


def fit_profile(path: Path, num_layers: int) -> PrefillModel:
    """Fit a model to a profile of operators by Vidur: CSV, ms, each operator of one layer.

    Attention is not in it. It is taken to run at the speed of the layers' other operations, whose
    number follows from the model's dimensions in the profile. Raises StartError for no such file.
    """
    try:
        rows = _rows(path)
        dimensions = _dimensions(path)
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StartError(str(path), f"cannot be read: {reason}", "give a profile") from error
    small = [row for row in rows if row.num_tokens <= _SMALL_TOKENS]
    large = [row for row in rows if row.num_tokens >= _LARGE_TOKENS]
    if not small or not large:
        problem = f"has no batches of up to {_SMALL_TOKENS}, or from {_LARGE_TOKENS} tokens on"
        raise StartError(str(path), problem, "give a whole profile")

    def seconds(row: _Row) -> float:
        return num_layers * row.layer_s + row.embedding_s

    tokens = np.array([row.num_tokens for row in large], float)
    times = np.array([seconds(row) for row in large])
    token_s = float(tokens @ times / (tokens @ tokens))
    if not token_s:
        raise StartError(str(path), "has batches that take no time", "give a whole profile")
    hidden, kv_width, inner, num_matrices = dimensions
    per_token = 2 * (hidden * (2 * hidden + 2 * kv_width) + num_matrices * hidden * inner)
    per_attended = 4 * hidden
    return PrefillModel(
        floor_s=float(np.median([seconds(row) for row in small])),
        token_s=token_s,
        attended_s=token_s * per_attended / per_token,
    )


def _table(path: Path) -> Sequence[dict[str, str]]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        rows = [*csv.DictReader(file)]
    if not rows:
        raise StartError(str(path), "has no rows", "give a profile")
    return rows


def _rows(path: Path) -> list[_Row]:
    """Return the rows of one device alone."""
    found: list[_Row] = []
    for number, row in enumerate(_table(path), start=2):
        if row.get("num_tensor_parallel_workers", "1") != "1":
            continue
        times = {
            name.split(".")[1]: _number(path, number, name, text) / 1000
            for name, text in row.items()
            if name.startswith("time_stats.") and name.endswith(".median") and text
        }
        embedding_s = times.pop("emb", 0.0)
        num_tokens = int(_number(path, number, "num_tokens", row.get("num_tokens", "")))
        found.append(_Row(num_tokens, sum(times.values()), embedding_s))
    return found


def _dimensions(path: Path) -> tuple[int, int, int, int]:
    """Return a model's width, that of its keys, that of its feed-forward part, and its matrices."""
    row = _table(path)[0]

    def number(name: str) -> int:
        return int(_number(path, 2, name, row.get(name, "")))

    hidden = number("n_embd")
    kv_width = hidden * number("n_kv_head") // max(1, number("n_head"))
    num_matrices = 3 if row.get("use_gated_mlp", "True") == "True" else 2
    return hidden, kv_width, number("n_expanded_embd"), num_matrices


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _NUMBER_MAX:
        problem = f"{text[:40]!r} is no number that can be"
        raise StartError(f"{path}:{line}: {name}", problem, "mend the profile")
    return value
