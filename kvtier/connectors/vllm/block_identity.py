"""What decides a block besides its tokens: an adapter, and the media between them.

A picture's tokens are placeholders, the same for all pictures. What makes the difference is an
identifier, which vLLM draws from the picture's content and from how it is prepared.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout

__all__ = ["BlockFacts", "block_ratio", "can_be_named", "extra_keys"]

_BLOCK_TOKENS = 64
"""At least so many tokens make a block of ours; vLLM's own are 16 on most devices, 128 on CPUs."""

_DIGEST = re.compile(r"(.*:)?[0-9a-f]{64}([0-9a-f]{64})?", re.DOTALL)
"""What vLLM draws from content; before it stands an adapter's name, where that sees the picture.

A client may give an identifier of its own instead. Within one run of vLLM it answers for that;
blocks that outlive it cannot rest on a name such as ``image-1``. Where preparation has options,
vLLM hides a client's identifier in a digest, and its word is all there is.
"""


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """A key space but for the weights. ``num_engine_blocks`` of vLLM's make one block of ours."""

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
    """Return how many of vLLM's blocks make one of ours."""
    return max(1, -(-_BLOCK_TOKENS // engine_block_tokens))


def can_be_named(request: Any) -> bool:
    """Tell whether all that decides the blocks of a request can be told, its adapter left aside.

    Embeddings in the place of tokens cannot; nor can a session that takes more input, for which
    vLLM exchanges tokens that were known before.
    """
    if request.prompt_embeds is not None or getattr(request, "resumable", False):
        return False
    return all(_DIGEST.fullmatch(feature.identifier or "") for feature in request.mm_features)


def extra_keys(request: Any, adapter: bytes, block_tokens: int) -> Mapping[int, bytes]:
    """Return by the block's index what decides it besides tokens and the blocks before it.

    An adapter is named in the first block only: all others are chained to that. A medium is named
    in each block it reaches into, with its place relative to that block's begin.
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
