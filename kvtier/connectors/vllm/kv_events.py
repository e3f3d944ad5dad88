"""News in vLLM's words: its KV events, which its own publisher sends to routers.

An event tells all of a block: its hash and its parent's as vLLM has them, tokens, block size. A
router can so learn of a block that it never heard was computed. ``AllBlocksCleared`` is vLLM's own
to say: routers take it for every medium. After it ours are told again.
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
"""Of ours that are remembered: four million tokens where a block has 64, and 60 MB."""

_BLOCKS_A_STEP = 512
"""Of which a step publishes: two milliseconds. The rest waits for the next one."""

_FAULTS_MAX = 8
"""In a row; what waits is given up then, since vLLM goes on with steps for as long as it waits."""

_GROUP = 0
"""Of KV: models with several are not served."""


class KvEvents:
    """Turns the news of one engine into events; all of it is for the scheduler's thread."""

    def __init__(self, spec: Any, block_tokens: int, ratio: int, num_ranks: int = 1) -> None:
        """``ratio`` of vLLM's blocks make one of ours, of ``block_tokens``."""
        self._kind = get_kv_cache_spec_kind(spec).value
        self._window = get_kv_cache_spec_sliding_window(spec)
        self._block_tokens = block_tokens
        self._ratio = ratio
        self._pool_map: Any = None
        self._num_faults = 0
        self.news = RouterFeed(self._describe, num_ranks, blocks_max=_BLOCKS_MAX)

    def take(self, pool: Any) -> list[KVCacheEvent]:
        """Take what is to be published now; ``pool`` is vLLM's, whose blocks are told by itself."""
        self._num_faults += 1
        if self._num_faults > _FAULTS_MAX:
            self.news.begin_again()
        events = self._take(pool)
        self._num_faults = 0
        return events

    def _take(self, pool: Any) -> list[KVCacheEvent]:
        # vLLM tells nobody that it has emptied its pool, but the map of it is then another one.
        pool_map = getattr(pool, "cached_block_hash_to_block", None)
        if pool_map is not self._pool_map:
            if self._pool_map is not None:
                self.news.announce_again()
            self._pool_map = pool_map
        told = self.news.take(_BLOCKS_A_STEP)
        events: list[KVCacheEvent] = [
            BlockRemoved(block_hashes=names, medium=_medium(medium), group_idx=_GROUP)
            for medium, names in told.withdrawn.items()
        ]
        for medium, run in told.announced:
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
        # With the one before them, which is the first one's parent.
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
        """Return what is in vLLM's hashes besides tokens, an entry for each block of its own."""
        if not (request.lora_request or request.mm_features or request.cache_salt):
            return None
        size = self._block_tokens // self._ratio
        starts = range(first_token, first_token + self._block_tokens, size)
        keys = [generate_block_hash_extra_keys(request, at, at + size, 0)[0] for at in starts]
        # Since 0.32 keys have tags in the hash, and none in events.
        untag = getattr(kv_cache_utils, "to_event_extra_keys", None)
        return tuple((untag(keys) if untag else keys) or ())


def open_events(
    vllm_config: Any, kv_cache_config: Any, block_tokens: int, ratio: int, num_ranks: int
) -> KvEvents | None:
    """Return what makes vLLM's KV events, if they were asked for."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    spec = kv_cache_config.kv_cache_groups[_GROUP].kv_cache_spec
    return KvEvents(spec, block_tokens, ratio, num_ranks)


def _medium(medium: int) -> str:
    return str(MEDIUM_CPU if medium == CPU else MEDIUM_STORAGE)


def _of_one_kind(run: list[RoutedBlock]) -> Iterator[list[RoutedBlock]]:
    """Yield parts of a run that one event can tell: of one adapter, all with extra keys or none."""
    part: list[RoutedBlock] = []
    for block in run:
        facts, last = block.facts, part[-1].facts if part else block.facts
        if (facts.lora, facts.extra_keys is None) != (last.lora, last.extra_keys is None):
            yield part
            part = []
        part.append(block)
    yield part
