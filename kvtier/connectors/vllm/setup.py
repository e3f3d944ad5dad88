"""Builds the halves in a process of vLLM from vLLM's configuration and the user's settings.

Imports vLLM.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from kvtier.client import Client, OwnTier
from kvtier.connectors.kit.copies import BlockCopier, open_copies
from kvtier.connectors.kit.pages import Pages
from kvtier.connectors.vllm.block_identity import (
    BlockFacts,
    KeySpaceResolver,
    RankReport,
    block_ratio,
)
from kvtier.connectors.vllm.jobs import WorkerReports
from kvtier.connectors.vllm.kv_events import KvEvents, open_events
from kvtier.connectors.vllm.router_feed import RouterFeed
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.connectors.vllm_common.model_config import model_config
from kvtier.connectors.vllm_common.refusal import layer_specs, refusal
from kvtier.connectors.vllm_common.release import arrangement, layout_name, local_model, release
from kvtier.connectors.vllm_common.settings import Settings, why_kept
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.tiers.base import Removed

__all__ = ["ConnectorSetup", "describe"]


@dataclass(frozen=True, slots=True)
class ConnectorSetup:
    """The configuration from which each half is built."""

    vllm_config: Any
    kv_cache_config: Any
    settings: Settings

    @property
    def model_name(self) -> str:
        """Return the last part of vLLM's model name."""
        return Path(self.vllm_config.model_config.model).name

    def resolver(self) -> KeySpaceResolver:
        """Start resolving the key spaces, for the scheduler half."""
        config = self.vllm_config
        return KeySpaceResolver(lambda: local_model(config), refusal(config, self.kv_cache_config))

    def describe(
        self, kv_caches: Mapping[str, torch.Tensor]
    ) -> tuple[RankReport, BlockCopier | None]:
        """Return the description of a worker's blocks, and their copier if they are served."""
        config, blocks = self.vllm_config, self.kv_cache_config
        if refused := refusal(config, blocks):
            return RankReport(None, refused), None
        try:
            pages = Pages(kv_caches, blocks.num_blocks)
            facts = RankReport(describe(config, blocks, kv_caches, pages))
            return facts, open_copies(pages)
        except (ValueError, KeyError, OSError, AttributeError) as error:
            return RankReport(None, str(error)), None  # the scheduler half logs it

    def open_events(self, spaces: Sequence[KeySpace], ratio: int) -> KvEvents | None:
        """Return the source of KV events for these key spaces, if they are enabled."""
        tokens, num_ranks = spaces[0].layout.block_tokens, len(spaces)
        return open_events(self.vllm_config, self.kv_cache_config, tokens, ratio, num_ranks)

    def scheduler_half(
        self,
        spaces: Sequence[KeySpace],
        ratio: int,
        router_feed: RouterFeed | None,
        own_tier: Callable[[KVLayout, int], OwnTier],
    ) -> SchedulerHalf:
        """Build the half with a client per rank; ``own_tier`` is called with layout and rank."""
        ranks = [
            Rank(
                self._client(
                    space,
                    "scheduler",
                    rank,
                    watch=router_feed.listener(rank) if router_feed else None,
                    own_tier=partial(own_tier, space.layout, rank),
                    drop=Removed if rank else why_kept,  # reported once per engine
                ),
                space.digest,
            )
            for rank, space in enumerate(spaces)
        ]
        tokens, role = spaces[0].layout.block_tokens, self.settings.role
        return SchedulerHalf(ranks, tokens, ratio, role, router_feed)

    def worker_half(
        self, facts: RankReport, weights: bytes, copies: BlockCopier, reports: WorkerReports
    ) -> WorkerHalf:
        """Start the half after the scheduler half. Raises if no thread can be started."""
        assert facts.blocks is not None, "only served blocks have a copier"
        rank = facts.blocks.parallel_rank
        client = self._client(facts.blocks.space(weights), "worker", rank, pin=copies.arena)
        client.start()
        return WorkerHalf(client, copies, rank, reports)

    def _client(self, space: KeySpace, half: str, rank: int, **more: Any) -> Client:
        settings, name = self.settings, f"vllm {self.model_name} {half}"
        return Client(settings.socket, space, name, deadlines=settings.deadlines, rank=rank, **more)


def describe(
    vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, torch.Tensor], pages: Pages
) -> BlockFacts:
    """Return the identity of the blocks in ``tensors``. Raises ValueError if it is unknown."""
    whole_spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    spec = layer_specs(whole_spec)[0]
    ratio = block_ratio(spec.block_size)
    arranged = arrangement(vllm_config, spec, tensors, next(iter(tensors.values())).device)
    pages_of = f"{pages.num_layers} of {_pages(tensors)}, {_names(tensors)}"
    layout = KVLayout(
        name=f"vllm-{layout_name(vllm_config).lower()}",
        version=1,
        block_tokens=ratio * spec.block_size,
        block_bytes=ratio * pages.block_bytes,
        dtype=_dtype(next(iter(tensors.values())).dtype),
        detail=f"{ratio}x({pages_of}),{arranged}",
    )
    parallel = vllm_config.parallel_config
    return BlockFacts(
        model_config=model_config(vllm_config),
        layout=layout,
        compute_dtype=_dtype(vllm_config.model_config.dtype),
        engine=f"vllm {'.'.join(map(str, release()))} {type(whole_spec).__name__}",
        codec=str(vllm_config.cache_config.cache_dtype),
        parallel_size=parallel.world_size,
        parallel_rank=parallel.rank,
        num_engine_blocks=ratio,
    )


def _pages(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the page shapes of all layers, with equal neighbours grouped."""
    each = [f"{_dtype(t.dtype)}[{'x'.join(map(str, t.shape[1:]))}]" for t in tensors.values()]
    return ",".join(f"{len(list(equal))}*{page}" for page, equal in groupby(each))


def _names(layers: Iterable[str]) -> str:
    """Return a digest of layer names, which differ between pipeline stages."""
    return hashlib.sha256("\n".join(layers).encode()).hexdigest()[:16]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
