"""A fake engine service on a real thread, its contract, and a model without weights.

``FakeEngineService`` answers by a script and implements ``kvtier.api.http.service.EngineService``.
``check_engine_service`` verifies it and the real engine alike.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from kvtier.api.http.service import EngineService
from kvtier.core.residency import TierName
from kvtier.engine.request import (
    Deliver,
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    Usage,
)

__all__ = ["ByteChatModel", "FakeEngineService", "ScriptedAnswer", "check_engine_service", "echo"]


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """The answer to one request, cut at its ``max_tokens``."""

    token_ids: tuple[int, ...]
    tier_tokens: Counter[TierName] = field(default_factory=Counter)
    decision: str = "computed"
    finish: FinishReason = FinishReason.STOP
    error: str = ""
    tokens_per_output: int = 1
    pause_after: int | None = None
    """Pause after this many tokens until ``resume`` or an abort."""


def echo(request: EngineRequest) -> ScriptedAnswer:
    """Answer with the prompt itself."""
    return ScriptedAnswer(request.prompt)


@dataclass(slots=True)
class _Open:
    request: EngineRequest
    deliver: Deliver
    answer: ScriptedAnswer
    num_sent: int = 0
    is_aborted: bool = False


class FakeEngineService:
    """Answers all open requests in turn, a few tokens at a time. All waits have deadlines."""

    def __init__(
        self,
        script: Callable[[EngineRequest], ScriptedAnswer] = echo,
        *,
        capacity: int | None = None,
    ) -> None:
        self.is_ready = True
        self.is_stuck = False
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        """Open requests that were aborted, in order."""
        self._script = script
        self._capacity = capacity
        self._open: dict[str, _Open] = {}
        self._is_paused = True
        self._is_stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Queue a request unless ``capacity`` requests are open."""
        with self._changed:
            if self._is_stopping:
                raise QueueFull("stopping")
            if self._capacity is not None and len(self._open) >= self._capacity:
                raise QueueFull("full")
            self.requests.append(request)
            self._open[request.request_id] = _Open(request, deliver, self._script(request))
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        """Abort an open request."""
        with self._changed:
            opened = self._open.get(request_id)
            if opened is not None and not opened.is_aborted:
                opened.is_aborted = True
                self.aborted.append(request_id)
                self._changed.notify_all()

    def resume(self) -> None:
        """Continue paused answers, and do not pause later ones."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[Self], bool], deadline_seconds: float = 30) -> bool:
        """Wait for a condition; return whether it became true."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), deadline_seconds)

    @property
    def num_open(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._open)

    def stop(self) -> None:
        """Abort all requests and end the thread."""
        with self._changed:
            self.is_ready = False
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._is_stopping:
                    for opened in self._open.values():
                        opened.is_aborted = True
                turn = [(o, self._next_output(o)) for o in self._open.values() if self._can_move(o)]
                for opened, output in turn:
                    if output.finish is not None:
                        del self._open[opened.request.request_id]
                self._changed.notify_all()
                is_over = self._is_stopping
            for opened, output in turn:
                opened.deliver(output)
            if is_over:
                return

    def _has_work(self) -> bool:
        return self._is_stopping or any(self._can_move(o) for o in self._open.values())

    def _can_move(self, opened: _Open) -> bool:
        return opened.is_aborted or not (
            self._is_paused and opened.num_sent == opened.answer.pause_after
        )

    def _next_output(self, opened: _Open) -> Output:
        request_id = opened.request.request_id
        if opened.is_aborted:
            return Output(request_id, (), FinishReason.ABORT, self._usage(opened))
        answer = opened.answer
        length = min(len(answer.token_ids), opened.request.max_tokens)
        end = min(length, opened.num_sent + answer.tokens_per_output)
        token_ids = answer.token_ids[opened.num_sent : end]
        is_first = opened.num_sent == 0
        opened.num_sent = end
        if end < length:
            usage = self._usage(opened) if is_first else None
            return Output(request_id, token_ids, usage=usage)
        if answer.finish is FinishReason.ERROR:
            return Output(request_id, (), FinishReason.ERROR, None, answer.error)
        is_cut = length < len(answer.token_ids) or length == opened.request.max_tokens
        finish = FinishReason.LENGTH if is_cut else answer.finish
        return Output(request_id, token_ids, finish, self._usage(opened))

    def _usage(self, opened: _Open) -> Usage:
        prompt_tokens = len(opened.request.prompt)
        tiers = opened.answer.tier_tokens
        assert tiers.total() < prompt_tokens, "a script must leave one token to compute"
        return Usage(
            prompt_tokens,
            opened.num_sent,
            tiers,
            prompt_tokens - tiers.total(),
            opened.answer.decision,
        )


_DEADLINE_SECONDS = 60.0
"""A real engine may run a small model on a busy machine."""


def check_engine_service(
    engine: EngineService, request: Callable[[str, int], EngineRequest]
) -> None:
    """Run every check. ``request(request_id, max_tokens)`` makes one that does not end early."""
    _check_outputs(engine, request("whole", 8))
    _check_abort(engine, request("aborted", 1000))
    engine.abort("whole")  # ended
    engine.abort("never-heard-of")
    _check_outputs(engine, request("after", 3))


def _check_outputs(engine: EngineService, request: EngineRequest) -> None:
    outputs, threads = _run(engine, request, abort_after=None)
    assert threads.isdisjoint({threading.get_ident()}), "deliver must run on the engine's thread"
    assert len(threads) == 1
    assert all(output.token_ids for output in outputs[:-1]), "only the last output may be empty"
    assert all(output.finish is None for output in outputs[:-1])
    assert all(output.usage is None for output in outputs[1:-1])
    first, last = outputs[0].usage, outputs[-1].usage
    assert first is not None
    assert last is not None
    assert first.tier_tokens == last.tier_tokens, "prompt sources must be known from the start"
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
    assert usage.prompt_tokens == usage.tier_tokens.total() + usage.computed_tokens
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


_END = 256
"""The only special token, which ends an answer and has no text."""


class ByteChatModel:
    """Fakes the text side of a model: tokens 0 to 255 are bytes of UTF-8.

    Characters are thus split across tokens as often as possible.
    """

    def __init__(self, model_id: str = "byte-model", context_limit: int = 2048) -> None:
        self.model_id = model_id
        self.context_limit = context_limit
        self.vocab_size = _END + 1
        self.eos_ids = frozenset({_END})
        self.special_tokens = {"<end>": _END}
        self.token_characters_max = 1

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of the bytes without a leading space, like SentencePiece.

        Bytes that are not valid UTF-8 become U+FFFD.
        """
        text = bytes(token for token in ids if token != _END).decode(errors="replace")
        return text.removeprefix(" ")

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Return one line per message; like many templates, rejects unknown roles."""
        for message in messages:
            if message["role"] not in {"system", "user", "assistant"}:
                raise ValueError(f"unknown role {message['role']}")
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")
