"""Everything that makes the bytes of vLLM's blocks comparable, as a key space.

The weights are hashed as they lie in their files, byte by byte, whatever the folder is called. What
cannot be told this way, as weights that are made up or come from elsewhere, makes blocks uncached.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["block_ratio", "model_config", "weights_fingerprint"]

_IGNORED_CONFIG = frozenset(
    {"_attn_implementation", "_name_or_path", "transformers_version", "use_cache"}
)
"""Names, paths and settings of the loading; everything else of a configuration counts."""

_BLOCK_TOKENS = 64
"""At least so many tokens make a block of ours; vLLM's own are 16 on most devices, 128 on CPUs."""

_NUM_THREADS = 2


def weights_fingerprint(folder: Path) -> bytes:
    """Return what stands for the weights in a folder. Raises ValueError where there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors to know the weights by")
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(_digest, files))
    text = json.dumps([[file.name, digest] for file, digest in zip(files, digests, strict=True)])
    return hashlib.sha256(b"kvtier.vllm.weights\0" + text.encode()).digest()


def model_config(hf_config: Any) -> str:
    """Return a whole configuration of transformers in canonical JSON, defaults included."""
    fields = json.loads(hf_config.to_json_string(use_diff=False))
    kept = {name: value for name, value in fields.items() if name not in _IGNORED_CONFIG}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"))


def block_ratio(engine_block_tokens: int) -> int:
    """Return how many of vLLM's blocks make one of ours."""
    return max(1, -(-_BLOCK_TOKENS // engine_block_tokens))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
