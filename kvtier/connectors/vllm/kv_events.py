"""vLLM's KV events for blocks in the daemon's tiers; vLLM's publisher sends them to routers.

An event describes a block completely: its hash and its parent's in vLLM's form, tokens, block size.
So a router can learn about a block that it never saw computed. Only vLLM sends
``AllBlocksCleared``, which routers apply to every medium; afterwards kvtier's blocks are announced
again. Imports vLLM.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from kvtier.connectors.vllm.router_feed import CPU, BlockNames, RoutedBlock, RouterFeed

__all__ = ["KvEvents", "open_events"]

_BLOCKS_MAX = 65_536
"""Limit of tracked blocks: four million tokens with 64-token blocks, and 60 MB."""

_BLOCKS_A_STEP = 512
"""Blocks published per step, which takes two milliseconds; others wait."""

_FAULTS_MAX = 8
"""Consecutive faults after which waiting events are dropped: vLLM runs steps while any wait."""

_GROUP = 0
"""Index of the KV group; models with several are not supported."""


class KvEvents:
    """Turns the router feed of one engine into events. Use it on the scheduler's thread only."""

    def __init__(self, spec: Any, block_tokens: int, ratio: int, num_ranks: int = 1) -> None:
        """``ratio`` vLLM blocks make one kvtier block of ``block_tokens``."""
        self._kind = get_kv_cache_spec_kind(spec).value
        self._window = get_kv_cache_spec_sliding_window(spec)
        self._block_tokens = block_tokens
        self._ratio = ratio
        self._pool_map: Any = None
        self._num_faults = 0
        self.router_feed = RouterFeed(self._describe, num_ranks, blocks_max=_BLOCKS_MAX)

    def take(self, pool: Any) -> list[KVCacheEvent]:
        """Take the events to publish now; ``pool`` is vLLM's block pool."""
        self._num_faults += 1
        if self._num_faults > _FAULTS_MAX:
            self.router_feed.restart()
        events = self._take(pool)
        self._num_faults = 0
        return events

    def _take(self, pool: Any) -> list[KVCacheEvent]:
        # vLLM does not report that it has emptied its pool, but it then replaces the pool's map.
        pool_map = getattr(pool, "cached_block_hash_to_block", None)
        if pool_map is not self._pool_map:
            if self._pool_map is not None:
                self.router_feed.reannounce()
            self._pool_map = pool_map
        update = self.router_feed.take(_BLOCKS_A_STEP)
        events: list[KVCacheEvent] = [
            BlockRemoved(block_hashes=names, medium=_medium(medium), group_idx=_GROUP)
            for medium, names in update.withdrawn.items()
        ]
        for medium, run in update.announced:
            events += [self._stored(medium, part) for part in _of_one_kind(run)]
        return events

    def _stored(self, medium: int, run: list[RoutedBlock]) -> BlockStored:
        first = run[0].facts
        extra_keys = [key for block in run for key in block.facts.extra_keys or ()]
        return BlockStored(
            block_hashes=[name for block in run for name in block.facts.names],
            parent_block_hash=first.parent_name,
            token_ids=np.concatenate([block.facts.token_ids for block in run]).tolist(),
            block_size=self._block_tokens // self._ratio,
            lora_id=first.lora[0] if first.lora else None,
            medium=_medium(medium),
            lora_name=first.lora[1] if first.lora else None,
            extra_keys=extra_keys or None,
            group_idx=_GROUP,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._window,
        )

    def _describe(self, request: Any, first: int, end: int) -> list[BlockNames]:
        ratio, size = self._ratio, self._block_tokens
        end = min(end, len(request.block_hashes) // ratio)
        # Includes the block before them, which is the first one's parent.
        hashes = request.block_hashes[max(0, first * ratio - 1) : end * ratio]
        names = [maybe_convert_block_hash(each) for each in hashes]
        names = names if first else [None, *names]
        token_ids = np.array(request.all_token_ids[first * size : end * size], np.uint32)
        lora = request.lora_request
        return [
            BlockNames(
                names=tuple(names[place * ratio + 1 : (place + 1) * ratio + 1]),
                parent_name=names[place * ratio],
                token_ids=token_ids[place * size : (place + 1) * size],
                extra_keys=self._extra_keys(request, (first + place) * size),
                lora=(lora.adapter_id, lora.name) if lora else None,
            )
            for place in range(end - first)
        ]

    def _extra_keys(self, request: Any, first_token: int) -> tuple[Any, ...] | None:
        """Return what vLLM's hashes contain besides tokens, one entry for each vLLM block."""
        if not (request.lora_request or request.mm_features or request.cache_salt):
            return None
        size = self._block_tokens // self._ratio
        starts = range(first_token, first_token + self._block_tokens, size)
        keys = [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in starts]
        # Since 0.32 keys are tagged in hashes, but not in events.
        untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
        return tuple((untag(keys) if untag else keys) or ())


def open_events(
    vllm_config: Any, kv_cache_config: Any, block_tokens: int, ratio: int, num_ranks: int
) -> KvEvents | None:
    """Return the source of KV events, if they are enabled."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    spec = kv_cache_config.kv_cache_groups[_GROUP].kv_cache_spec
    return KvEvents(spec, block_tokens, ratio, num_ranks)


def _medium(medium: int) -> str:
    return str(MEDIUM_CPU if medium == CPU else MEDIUM_STORAGE)


def _of_one_kind(run: list[RoutedBlock]) -> Iterator[list[RoutedBlock]]:
    """Split a run by event: each part has one adapter, and extra keys for all blocks or none."""
    part: list[RoutedBlock] = []
    for block in run:
        facts, last = block.facts, part[-1].facts if part else block.facts
        if (facts.lora, facts.extra_keys is None) != (last.lora, last.extra_keys is None):
            yield part
            part = []
        part.append(block)
    yield part
