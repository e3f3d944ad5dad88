"""Determines the identity of vLLM's blocks: their key space, and each block's adapter and media.

A worker knows everything about its key space except the weights. The scheduler half fingerprints
those, so that a machine reads them once and vLLM does not wait. Until the key spaces are known,
vLLM serves without kvtier; if they cannot be determined, the reason is logged once.

An image's tokens are placeholders, the same for all images. What distinguishes them is an
identifier, which vLLM derives from the image's content and its preprocessing.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.connectors.kit.adapters import Adapter, AdapterFingerprints
from kvtier.connectors.kit.weights import FileDigests, WeightsFingerprint, began_ns, record_path
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.observe.log import Log

__all__ = [
    "BlockFacts",
    "KeySpaceResolver",
    "RankReport",
    "adapter_of",
    "block_ratio",
    "can_be_named",
    "extra_keys",
]

_BLOCK_TOKENS = 64
"""Minimum tokens of a kvtier block; vLLM's own have 16 on most devices, 128 on CPUs."""

_DIGEST = re.compile(r"(.*:)?[0-9a-f]{64}([0-9a-f]{64})?", re.DOTALL)
"""An identifier that vLLM derives from content, prefixed with the name of an adapter that sees it.

A client may choose an identifier instead, such as ``image-1``. It vouches for it during one run of
vLLM, but blocks outlive the run and cannot rely on it. If preprocessing has options, vLLM hashes
the client's identifier, which then has to be trusted.
"""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A key space without its weights; ``num_engine_blocks`` vLLM blocks make one kvtier block."""

    model_config: str
    layout: KVLayout
    compute_dtype: str
    engine: str
    codec: str
    parallel_size: int
    parallel_rank: int
    num_engine_blocks: int

    def space(self, weights: bytes) -> KeySpace:
        """Return the key space of blocks that were computed with these weights."""
        return KeySpace(
            weights=weights,
            model_config=self.model_config,
            layout=self.layout,
            compute_dtype=self.compute_dtype,
            engine=self.engine,
            codec=self.codec,
            parallel_size=self.parallel_size,
            parallel_rank=self.parallel_rank,
        )


def block_ratio(engine_block_tokens: int) -> int:
    """Return how many vLLM blocks make one kvtier block."""
    return max(1, -(-_BLOCK_TOKENS // engine_block_tokens))


@dataclass(frozen=True, slots=True)
class RankReport:
    """A worker's description of its blocks; None if it refuses to serve them."""

    blocks: BlockFacts | None
    refusal: str = ""
    """Why the blocks are not served."""


def adapter_of(lora: Any) -> Adapter:
    """Return the adapter that a ``LoRARequest`` names."""
    doubt = ""
    if type(lora).__name__ != "LoRARequest":
        doubt = f"{type(lora).__name__} may carry weights of its own"
    elif getattr(lora, "tensorizer_config_dict", None):
        doubt = "its weights are loaded by tensorizer"
    # vLLM reads the weights of experts in one of two ways, which the request selects.
    settings = {"is_fused": bool(getattr(lora, "is_3d_lora_weight", False))}
    return Adapter(
        lora.lora_int_id, lora.lora_name, "" if doubt else lora.lora_path, settings, doubt
    )


def can_be_named(request: Any) -> bool:
    """Return whether everything that determines a request's blocks is known, except its adapter.

    It is unknown for embeddings in place of tokens, and for a session that takes more input, since
    vLLM then replaces earlier tokens.
    """
    if request.prompt_embeds is not None or getattr(request, "resumable", False):
        return False
    return all(_DIGEST.fullmatch(feature.identifier or "") for feature in request.mm_features)


def extra_keys(request: Any, adapter: bytes, block_tokens: int) -> Mapping[int, bytes]:
    """Return, by block index, what determines a block besides its tokens and the blocks before it.

    An adapter is part of the first block only, since all others are chained to it. A medium is part
    of each block that it overlaps, with its offset relative to the block's start.
    """
    parts: dict[int, list[object]] = defaultdict(list)
    if adapter:
        parts[0].append(["adapter", adapter.hex()])
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        medium = feature.identifier.rpartition(":")[2]
        first, last = start // block_tokens, (start + max(length, 1) - 1) // block_tokens
        for index in range(first, last + 1):
            place = start - index * block_tokens
            parts[index].append(["medium", feature.modality, medium, place, length])
    return {index: json.dumps(part).encode() for index, part in parts.items()}


_log = Log("kvtier.vllm")

_WAIT_S = 5.0
"""vLLM takes longer to start; weights with recorded digests are known at once."""


class KeySpaceResolver:
    """Determines the key spaces of all ranks, on threads of the scheduler half's process."""

    def __init__(self, find_model: Callable[[], Path], refusal: str) -> None:
        """Start fingerprinting the weights of the model that ``find_model`` returns.

        With a ``refusal``, which says why blocks cannot be cached, nothing is read.
        """
        since_ns = began_ns()
        self._digests = FileDigests(record_path())
        self._fingerprint = WeightsFingerprint(find_model, since_ns, self._digests)
        self._ranks: Sequence[RankReport] = ()
        self._is_over = False
        self.adapters = AdapterFingerprints(self._digests, since_ns)
        if refusal:
            self._refuse(refusal)
        else:
            self._fingerprint.start()

    @property
    def weights(self) -> bytes:
        """Return the fingerprint of the weights; empty while it is not known."""
        return self._fingerprint.weights

    def set_ranks(self, ranks: Sequence[RankReport]) -> None:
        """Take the report of each rank, in rank order."""
        self._ranks = ranks
        if not self._is_over:
            self._fingerprint.wait(_WAIT_S)

    def take_spaces(self) -> list[KeySpace]:
        """Take the key space of each rank, once; empty while they are not known."""
        if self._is_over or not self._ranks or not self._fingerprint.wait(0):
            return []
        self._is_over = True
        if reason := _refusal(self._ranks) or self._fingerprint.refusal:
            self._refuse(reason)
            return []
        return [rank.blocks.space(self.weights) for rank in self._ranks if rank.blocks]

    @property
    def num_engine_blocks(self) -> int:
        """Return how many vLLM blocks make one kvtier block, once there are key spaces."""
        return next(rank.blocks.num_engine_blocks for rank in self._ranks if rank.blocks)

    def close(self) -> None:
        """Stop reading files."""
        self._digests.end()
        self.adapters.close()

    def _refuse(self, reason: str) -> None:
        self._is_over = True
        _log.error("vLLM's blocks are not cached", reason=reason)


def _refusal(ranks: Sequence[RankReport]) -> str:
    """Return why the ranks' blocks cannot be cached together; empty if they can."""
    if reasons := {rank.refusal for rank in ranks if rank.blocks is None}:
        return "; ".join(sorted(reasons))
    blocks = [rank.blocks for rank in ranks if rank.blocks]
    places = [(each.parallel_rank, each.parallel_size) for each in blocks]
    if places != [(rank, places[0][1]) for rank in range(places[0][1])]:
        found = ", ".join(f"{rank} of {size}" for rank, size in places)
        return f"expected a report from every rank, in order, but got {found}"
    sizes = {(each.layout.block_tokens, each.num_engine_blocks) for each in blocks}
    if len(sizes) > 1:
        found = " and ".join(f"{tokens} in {ratio}" for tokens, ratio in sorted(sizes))
        return f"ranks have blocks of different size: tokens {found} vLLM blocks"
    return ""
