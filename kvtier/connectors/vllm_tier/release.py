"""What differs between releases in what vLLM and a tier say to each other."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.tiering.base import JobResult

from kvtier.connectors.vllm_tier.transfers import Ended

__all__ = ["chunk_ids", "names_from", "result"]


def chunk_ids(job: Any) -> list[int]:
    """Return which chunks of vLLM's CPU tier a job is about, in the order of its keys."""
    ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids  # 0.28
    return [int(each) for each in ids]


def names_from(context: Any, block_tokens: int, first: int) -> Sequence[bytes]:
    """Return the names of a request's chunks from place ``first`` on, as many as there are.

    From 0.32 on a request's context has them, in order, with the place where each one ends. Before
    that vLLM touches them all each time that it looks for hits, and this returns none.
    """
    positions: dict[bytes, int] = getattr(context, "_offload_key_positions", {})
    names: list[bytes] = []
    for name, end_token in reversed(positions.items()):
        if end_token <= first * block_tokens:
            break
        names.append(name)
    is_next = bool(names) and positions[names[-1]] == (first + 1) * block_tokens
    return names[::-1] if is_next else ()


def result(ended: Ended) -> Any:
    """Return what vLLM is told of a job that is over."""
    more: dict[str, Any] = {}
    if "transfer_bytes" in JobResult.__dataclass_fields__:  # from 0.32 on
        more["transfer_bytes"] = ended.num_bytes
    names = ended.names if ended.is_load and not ended.is_whole else ()
    return JobResult(
        job_id=ended.job,
        success=ended.is_whole,
        successful_keys=names or None,
        transfer_time=ended.seconds,
        **more,
    )
