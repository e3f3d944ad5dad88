"""The contract of an engine service, as checks that any implementation must pass."""

import queue
import threading
from collections.abc import Callable

from kvtier.api.http.service import EngineService
from kvtier.engine.request import EngineRequest, FinishReason, Output

__all__ = ["check_engine_service"]

_DEADLINE_SECONDS = 60.0
"""A real engine may run a small model on a busy machine."""


def check_engine_service(
    engine: EngineService, request: Callable[[str, int], EngineRequest]
) -> None:
    """Run every check; ``request(request_id, max_tokens)`` makes one that does not end early."""
    _check_outputs(engine, request("whole", 8))
    _check_abort(engine, request("aborted", 1000))
    engine.abort("whole")  # ended
    engine.abort("never-heard-of")
    _check_outputs(engine, request("after", 3))


def _check_outputs(engine: EngineService, request: EngineRequest) -> None:
    outputs, threads = _run(engine, request, abort_after=None)
    assert threads.isdisjoint({threading.get_ident()}), "deliver runs on the engine's thread"
    assert len(threads) == 1
    assert all(output.token_ids for output in outputs[:-1]), "only the last may bring no token"
    assert all(output.finish is None for output in outputs[:-1])
    assert all(output.usage is None for output in outputs[1:-1])
    first, last = outputs[0].usage, outputs[-1].usage
    assert first is not None
    assert last is not None
    assert first.tier_tokens == last.tier_tokens, "who supplied the prompt is known from the start"
    assert outputs[-1].finish is FinishReason.LENGTH
    assert sum(len(output.token_ids) for output in outputs) == request.max_tokens
    _check_usage(outputs, request)


def _check_abort(engine: EngineService, request: EngineRequest) -> None:
    outputs, _ = _run(engine, request, abort_after=2)
    assert outputs[-1].finish is FinishReason.ABORT
    _check_usage(outputs, request)


def _check_usage(outputs: list[Output], request: EngineRequest) -> None:
    usage = outputs[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(request.prompt)
    assert usage.prompt_tokens == usage.tier_tokens.total + usage.computed_tokens
    assert usage.completion_tokens >= sum(len(output.token_ids) for output in outputs)
    assert usage.decision


def _run(
    engine: EngineService, request: EngineRequest, *, abort_after: int | None
) -> tuple[list[Output], set[int]]:
    arrivals: queue.Queue[tuple[Output, int]] = queue.Queue(request.max_tokens + 1)
    engine.submit(request, lambda output: arrivals.put_nowait((output, threading.get_ident())))
    outputs: list[Output] = []
    threads: set[int] = set()
    while not outputs or outputs[-1].finish is None:
        output, thread = arrivals.get(timeout=_DEADLINE_SECONDS)
        assert output.request_id == request.request_id
        outputs.append(output)
        threads.add(thread)
        if len(outputs) == abort_after:
            engine.abort(request.request_id)
    return outputs, threads
