"""vLLM's multi-tier offloading where the KV cache is in a CPU's memory, as it is in these tests.

vLLM's own spec refuses CPUs because the copies between its KV cache and its CPU tier are CUDA's.
These are replaced here, and nothing else: the scheduling half, the CPU tier with its shared memory,
the manager of the tiers behind it and the order of all calls are vLLM's.
"""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not there to be checked
    """Copies at once, and says so when it is asked."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._pages = [
            (each.tensor, region.create_next_worker_view(each.page_size_bytes))
            for each in kv_caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pages:
            for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                chunks[int(chunk)].copy_(blocks[int(block)].view(torch.int8))
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for blocks, chunks in self._pages:
            for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                blocks[int(block)].view(torch.int8).copy_(chunks[int(chunk)])
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Iterable[int]) -> None:
        """Do nothing: whatever was begun is done."""

    def _end(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, True))
        return True


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not there to be checked
    """One worker, and one block of vLLM's a chunk."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == self.config.parallel.world_size == 1
        num_chunks = getattr(self, "num_chunks", None) or self.num_blocks  # 0.28
        region = SharedOffloadRegion(
            self._engine_id,
            num_chunks,
            0,
            self.kv_bytes_per_chunk,
            self.cpu_page_size_per_worker,
        )
        return HostWorker(kv_caches, region)
