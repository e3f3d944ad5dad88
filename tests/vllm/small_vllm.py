"""As much of vLLM as the two halves see: requests, a block pool, tensors, the order of calls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch

from kvtier.client import Client, ClientDeadlines
from kvtier.connectors.kit.copies import BlockCopier, HostCopier
from kvtier.connectors.kit.pages import Pages
from kvtier.connectors.vllm.router_feed import RouterFeed
from kvtier.connectors.vllm.scheduler import Rank, SchedulerHalf
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.connectors.vllm_common.settings import Role
from kvtier.core.identity import KeySpace
from kvtier.core.layout import KVLayout
from kvtier.testing.child import await_true

BLOCK_TOKENS = 16
RATIO = 4
NUM_BLOCKS = 64
PAGE_FLOATS = 32


@dataclass
class Pool:
    """Counts references, as vLLM's pool does."""

    blocks: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    references: dict[int, int] = field(default_factory=dict)

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]


def request(name: str, tokens: list[int], **more: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": tokens,
        "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": 0,
        "num_output_tokens": 0,
        "num_preemptions": 0,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "kv_transfer_params": None,
        "skip_reading_prefix_cache": False,
        "trace_headers": None,
    }
    return SimpleNamespace(**fields | more)


class SmallVllm:
    """One engine; ``prefill`` takes a request through its steps and returns what was loaded."""

    def __init__(
        self,
        socket: Path,
        weights: bytes = bytes(32),
        *,
        deadlines: ClientDeadlines | None = None,
        copies: Callable[[Pages], BlockCopier] = HostCopier,
        num_ranks: int = 1,
        role: Role = Role.BOTH,
        router_feed: RouterFeed | None = None,
    ) -> None:
        shape = (NUM_BLOCKS, 2, BLOCK_TOKENS, PAGE_FLOATS)
        self.tensors: dict[str, torch.Tensor] = {}
        """Of all ranks."""
        self.clients: list[Client] = []
        self.workers: list[WorkerHalf] = []
        block_tokens = RATIO * BLOCK_TOKENS
        ranks: list[Rank] = []
        for rank in range(num_ranks):
            tensors = {f"rank{rank}.layer{number}": torch.zeros(shape) for number in range(2)}
            self.tensors |= tensors
            pages = Pages(tensors, NUM_BLOCKS)
            own_copies = copies(pages)
            layout = KVLayout(
                "vllm-lbhnc", 1, block_tokens, RATIO * pages.block_bytes, "float32", "small"
            )
            space = KeySpace(
                weights,
                "{}",
                layout,
                "float32",
                "small",
                parallel_size=num_ranks,
                parallel_rank=rank,
            )
            deadlines = deadlines or ClientDeadlines(5, 10, 10, 0.1)
            listener = router_feed.listener(rank) if router_feed else None
            asker = Client(
                socket, space, "small scheduler", deadlines=deadlines, rank=rank, watch=listener
            )
            ranks.append(Rank(asker, space.digest))
            copier = Client(
                socket,
                space,
                "small worker",
                deadlines=deadlines,
                rank=rank,
                pin=own_copies.arena,
            )
            self.workers.append(WorkerHalf(copier, own_copies, rank))
            self.clients += [asker, copier]
        for client in self.clients:
            client.start()
        self.pool = Pool()
        self.scheduler = SchedulerHalf(ranks, block_tokens, RATIO, role, router_feed)
        self.scheduler.bind(self.pool)
        self.worker = self.workers[0]
        self._names = count()
        self._last_step = 0

    def __enter__(self) -> Self:
        for client in self.clients:
            assert client.wait_attached(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    def prefill(
        self,
        tokens: list[int],
        blocks: list[int],
        num_local: int = 0,
        *,
        before_copy: Callable[[], None] = lambda: None,
        **more: Any,
    ) -> tuple[int, set[int]]:
        """Return how many tokens were promised, and which of vLLM's blocks did not come."""
        asked = request(f"request-{next(self._names)}", tokens, **more)
        scheduler = self.scheduler
        scheduler.add(asked)
        found: list[int] = []

        def is_answered() -> bool:
            answer = scheduler.match(asked, num_local)
            found.extend([] if answer is None else [answer])
            return bool(found)

        await_true(is_answered, "the lookup has ended")
        before_copy()
        scheduler.start_load(asked, blocks, found[0])
        missing = self._step({}, asked) if found[0] else set()
        self.compute(tokens, blocks, num_local + found[0])
        self._step({asked.request_id: num_local + found[0]}, asked, blocks)
        asked.num_output_tokens = 1
        await_true(lambda: self._settle() == 0, "the stores are over")
        scheduler.finish(asked)
        return found[0], missing

    def compute(self, tokens: list[int], blocks: list[int], start: int = 0) -> None:
        """Fill blocks with what depends on all tokens up to them."""
        for index, block in enumerate(blocks):
            end = (index + 1) * BLOCK_TOKENS
            if end > start and end <= len(tokens):
                for number, tensor in enumerate(self.tensors.values()):
                    tensor[block] = float(hash((tuple(tokens[:end]), number)) % 100_003)

    def content(self, blocks: list[int]) -> list[torch.Tensor]:
        return [tensor[blocks].clone() for tensor in self.tensors.values()]

    def _step(
        self, computed: dict[str, int], asked: Any, blocks: list[int] | None = None
    ) -> set[int]:
        fresh = [
            SimpleNamespace(req_id=name, num_computed_tokens=past, block_ids=(blocks,))
            for name, past in computed.items()
        ]
        cached = SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        )
        self.scheduler.start_stores(
            SimpleNamespace(
                scheduled_new_reqs=fresh,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={
                    name: asked.num_tokens - past for name, past in computed.items()
                },
            )
        )
        jobs = self.scheduler.take_jobs()
        self._last_step = jobs.step
        for worker in self.workers:
            worker.load(jobs)
            worker.store(jobs)
        if not jobs.loads:
            return set()
        missing: set[int] = set()
        for worker in self.workers:
            reports = worker.reports
            await_true(
                lambda each=reports: asked.request_id in each.take_received(), "the load is over"
            )
            missing |= reports.take_missing()
        self._settle()
        return missing

    def _settle(self) -> int:
        """Tell what each worker is done with in a step of its own, as it happens to be."""
        for worker in self.workers:
            results = worker.reports.take_results(self._last_step)
            self._last_step = 0
            if results is not None:
                self.scheduler.take_results(results)
        return len(self.scheduler._stores)
