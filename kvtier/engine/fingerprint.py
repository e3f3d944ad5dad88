"""Content fingerprints of a loaded model, for its key space.

Two models whose results could differ must never share a block, whatever their names; two copies of
one model always may. So the weights are hashed as loaded, byte by byte, and the whole configuration
counts except for fields known not to affect the results.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["canonical_config", "weights_fingerprint"]

_CHUNK_BYTES = 32 << 20
"""32 MiB: enough chunks to keep every core busy, without noticeable overhead."""

_IGNORED_CONFIG = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "attn_implementation",
        "name_or_path",
        "transformers_version",
        "use_cache",
    }
)
"""Names, paths and load settings; all other fields of a configuration count."""


def weights_fingerprint(model: torch.nn.Module, num_threads: int | None = None) -> bytes:
    """Return the SHA-256 of all parameters and buffers: names, dtypes, shapes and bytes."""
    tensors = sorted(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers()],
        key=lambda named: named[0],
    )
    with ThreadPoolExecutor(num_threads or torch.get_num_threads()) as threads:
        chunks = {  # tied tensors are hashed once
            _storage_of(tensor): threads.map(_hash_chunk, _chunks(tensor)) for _, tensor in tensors
        }
        contents = {storage: b"".join(digests) for storage, digests in chunks.items()}
    total = hashlib.sha256(b"kvtier.weights\0")
    for name, tensor in tensors:
        described = json.dumps([name, str(tensor.dtype), list(tensor.shape)])
        content = hashlib.sha256(contents[_storage_of(tensor)]).digest()
        total.update(described.encode() + b"\0" + content)
    return total.digest()


def _storage_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...], str]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def _chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return [flat[start : start + _CHUNK_BYTES] for start in range(0, len(flat), _CHUNK_BYTES)]


def _hash_chunk(chunk: torch.Tensor) -> bytes:
    content: npt.NDArray[np.uint8] = chunk.cpu().numpy()
    return hashlib.sha256(content.data).digest()  # hashlib releases the GIL


def canonical_config(fields: dict[str, object]) -> str:
    """Return a configuration as JSON that is identical for the same model everywhere."""
    kept = {name: value for name, value in fields.items() if name not in _IGNORED_CONFIG}
    return json.dumps(kept, sort_keys=True, separators=(",", ":"), default=str)
