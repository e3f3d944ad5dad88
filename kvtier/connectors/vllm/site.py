"""Where a half begins: in a process of vLLM, by its configuration and what its user says of us.

Needs vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvtier.client import Client, OwnTier
from kvtier.connectors.vllm.identity.description import describe
from kvtier.connectors.vllm.order import RankFacts
from kvtier.connectors.vllm.refusal import refusal
from kvtier.connectors.vllm.release import local_model
from kvtier.connectors.vllm.reports import WorkerReports
from kvtier.connectors.vllm.routers.events import Events, open_events
from kvtier.connectors.vllm.routers.news import News
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.settings import Settings, why_kept
from kvtier.connectors.vllm.start import Start
from kvtier.connectors.vllm.transfer.copies import Copies, open_copies
from kvtier.connectors.vllm.transfer.pages import Pages
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.tiers.base import Removed

__all__ = ["Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """What each half is made of; nothing of it changes."""

    vllm_config: Any
    kv_cache_config: Any
    settings: Settings

    @property
    def model_name(self) -> str:
        """Return the last part of what vLLM calls its model."""
        return Path(self.vllm_config.model_config.model).name

    def start(self) -> Start:
        """Begin to find out what the model is, for the scheduler half."""
        config = self.vllm_config
        return Start(lambda: local_model(config), refusal(config, self.kv_cache_config))

    def describe(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[RankFacts, Copies | None]:
        """Return what a worker's blocks are, and what copies them if they are served."""
        config, blocks = self.vllm_config, self.kv_cache_config
        if refused := refusal(config, blocks):
            return RankFacts(None, refused), None
        try:
            pages = Pages(kv_caches, blocks.num_blocks)
            facts = RankFacts(describe(config, blocks, kv_caches, pages))
            return facts, open_copies(pages)
        except (ValueError, KeyError, OSError, AttributeError) as error:
            return RankFacts(None, str(error)), None  # the scheduler half says it

    def open_events(self, spaces: Sequence[KeySpace], ratio: int) -> Events | None:
        """Return what makes vLLM's KV events of these key spaces, if they were asked for."""
        tokens, num_ranks = spaces[0].layout.block_tokens, len(spaces)
        return open_events(self.vllm_config, self.kv_cache_config, tokens, ratio, num_ranks)

    def scheduler_half(
        self,
        spaces: Sequence[KeySpace],
        ratio: int,
        news: News | None,
        own_tier: Callable[[KVLayout, int], OwnTier],
    ) -> SchedulerHalf:
        """Make it, with a client for each rank's key space, whose own tier is asked for by rank."""
        ranks = [
            Rank(
                self._client(
                    space,
                    "scheduler",
                    rank,
                    watch=news.hear(rank) if news else None,
                    own_tier=partial(own_tier, space.layout, rank),
                    drop=Removed if rank else why_kept,  # an engine says it once
                ),
                space.digest,
            )
            for rank, space in enumerate(spaces)
        ]
        half = SchedulerHalf(ranks, spaces[0].layout.block_tokens, ratio, self.settings.role)
        half.news = news
        return half

    def worker_half(
        self, facts: RankFacts, weights: bytes, copies: Copies, reports: WorkerReports
    ) -> WorkerHalf:
        """Begin it, now that the scheduler half has begun. Raises where no thread is to be had."""
        assert facts.blocks is not None, "there are copies of blocks that are served"
        rank = facts.blocks.parallel_rank
        client = self._client(facts.blocks.space(weights), "worker", rank, pin=copies.arena)
        client.start()
        return WorkerHalf(client, copies, rank, reports)

    def _client(self, space: KeySpace, half: str, rank: int, **more: Any) -> Client:
        settings, name = self.settings, f"vllm {self.model_name} {half}"
        return Client(settings.socket, space, name, deadlines=settings.deadlines, rank=rank, **more)
