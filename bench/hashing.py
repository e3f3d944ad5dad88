"""Compare chain-hashing of a prompt with SHA-256 of the same bytes in one call.

    python bench/hashing.py [--tokens 131072] [--json]

Chain-hashing is what an engine does with a new prompt before a lookup. Prints medians; the ratio is
the cost of dividing the prompt into blocks.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks


def median_s(step: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--block-tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tokens = np.random.default_rng(0).integers(0, 50_000, options.tokens, np.uint32)
    listed = tokens.tolist()  # as a tokenizer returns them
    root = chain_root(bytes(16), NO_TENANT)
    whole_s = median_s(lambda: hashlib.sha256(tokens).digest(), options.runs)
    convert_s = median_s(lambda: np.asarray(listed, "<u4"), options.runs)
    figures = {"tokens": options.tokens, "sha256_ms": round(whole_s * 1000, 3)}
    figures["list_to_array_ms"] = round(convert_s * 1000, 3)
    for size in options.block_tokens:
        seconds = median_s(lambda size=size: hash_blocks(root, listed, size), options.runs)
        figures[f"blocks_of_{size}_ms"] = round(seconds * 1000, 3)
        figures[f"blocks_of_{size}_ratio"] = round(seconds / (whole_s + convert_s), 2)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28} {value:>10,}")


if __name__ == "__main__":
    main()
