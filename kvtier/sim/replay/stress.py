"""Traffic mixed into a trace, to see what a policy makes of it: noise, and a reader in circles."""

from dataclasses import replace

import numpy as np

from kvtier.sim.replay.trace import Trace, TraceRequest, in_order, numbered_keys

__all__ = ["with_cycle", "with_noise"]


def with_noise(trace: Trace) -> Trace:
    """Return the trace with a prompt that never comes back after each request, as long as it."""
    requests: list[TraceRequest] = []
    next_number = trace.num_distinct
    for request in trace.requests:
        count = len(request.blocks)
        fresh = np.arange(next_number, next_number + count, dtype=np.int32)
        requests += [request, TraceRequest(request.at_ns, fresh, request.num_tokens)]
        next_number += count
    return _mixed(trace, "noise", requests, next_number)


def with_cycle(trace: Trace, num_documents: int, num_blocks: int) -> Trace:
    """Return the trace with a reader that goes through documents in turn, one every other request.

    Each has ``num_blocks`` blocks of its own.
    """
    requests: list[TraceRequest] = []
    first = trace.num_distinct
    for number, request in enumerate(trace.requests):
        requests.append(request)
        if number % 2:
            start = first + (number // 2) % num_documents * num_blocks
            document = np.arange(start, start + num_blocks, dtype=np.int32)
            requests.append(TraceRequest(request.at_ns, document, num_blocks * trace.block_tokens))
    return _mixed(trace, "cycle", requests, first + num_documents * num_blocks)


def _mixed(trace: Trace, name: str, requests: list[TraceRequest], num_distinct: int) -> Trace:
    return replace(
        trace,
        name=f"{trace.name} with {name}",
        requests=in_order(requests),
        keys=numbered_keys(num_distinct),
    )
