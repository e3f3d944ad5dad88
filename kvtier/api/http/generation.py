"""Runs one call on the engine: tokens in, text out.

The engine's thread passes outputs to the server's loop through one queue per call. If a call ends
early (client disconnected, error, shutdown), ``close`` aborts its requests.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from kvtier.api.http.detokenizer import Detokenizer, StopFinder
from kvtier.api.http.engine_call import EngineCall
from kvtier.api.http.errors import ApiError, engine_failed, engine_silent, not_ready, overloaded
from kvtier.api.http.service import ChatModel, EngineService, Observer, PromptOutcome
from kvtier.engine.request import (
    Deliver,
    EngineRequest,
    FinishReason,
    Output,
    QueueFull,
    RequestRefused,
    Usage,
)
from kvtier.observe.log import Log
from kvtier.observe.trace import TRACES

__all__ = ["Backend", "Generation", "Piece"]

_log = Log("kvtier.http")


@dataclass(frozen=True, slots=True)
class Backend:
    """The engine, model and observer of all generations."""

    engine: EngineService
    model: ChatModel
    observer: Observer
    clock: Callable[[], float]
    """Returns monotonic seconds."""
    silence_seconds: float


@dataclass(frozen=True, slots=True)
class Piece:
    """More text of one choice; the last piece has a finish reason and the usage."""

    index: int
    text: str
    finish: FinishReason | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class _QueuedOutput:
    """An output in the queue, with the time when the engine delivered it."""

    index: int
    output: Output
    seconds: float


class Generation:
    """One call: submit its prompts with ``start``, read ``pieces``, and always ``close``."""

    def __init__(
        self, call: EngineCall, backend: Backend, began_seconds: float, traceparent: str = ""
    ) -> None:
        """``traceparent`` is the client's trace context."""
        self.call = call
        self._traceparent = traceparent
        self._backend = backend
        self._choices = [
            _Choice(index, request, call.stops, backend, began_seconds)
            for index, request in enumerate(call.requests)
        ]
        # A slow reader cannot make this grow without limit: an output has at least one token or is
        # the last, so a request never has more than max_tokens + 1 of them. The engine does not
        # wait for readers, since that would stall the whole batch.
        self._outputs = asyncio.Queue[_QueuedOutput](sum(r.max_tokens + 1 for r in call.requests))

    def start(self) -> None:
        """Submit every prompt; raises ApiError if the engine refuses one."""
        for choice in self._choices:
            TRACES.begin(choice.request.request_id, self._traceparent)
            try:
                self._backend.engine.submit(choice.request, self._deliver_to(choice.index))
            except QueueFull:
                raise overloaded() if self._backend.engine.is_ready else not_ready() from None
            except RequestRefused as error:
                raise ApiError(str(error)) from None
            choice.is_open = True

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Yield the text of all choices as it arrives; raises ApiError if one of them fails."""
        num_open = len(self._choices)
        while num_open:
            queued = await self._next()
            choice = self._choices[queued.index]
            piece = choice.take(queued.output, queued.seconds)
            if piece.finish is not None:
                num_open -= 1
            if piece.text or piece.finish is not None:
                yield piece

    def close(self, outcome: PromptOutcome = PromptOutcome.ABORT) -> None:
        """Abort requests that are still running, and count them as ``outcome``."""
        for choice in self._choices:
            choice.close(outcome)

    def _deliver_to(self, index: int) -> Deliver:
        loop = asyncio.get_running_loop()
        clock = self._backend.clock

        def deliver(output: Output) -> None:
            queued = _QueuedOutput(index, output, clock())
            try:
                loop.call_soon_threadsafe(self._outputs.put_nowait, queued)
            except RuntimeError:
                # The loop is closed: the server has stopped, and the engine's thread goes on.
                return

        return deliver

    async def _next(self) -> _QueuedOutput:
        while True:
            try:
                async with asyncio.timeout(self._backend.silence_seconds):
                    return await self._outputs.get()
            except TimeoutError:
                # A long queue is normal. A stuck engine is an error, and so is one that does not
                # end an aborted request.
                if self._backend.engine.is_stuck or any(c.is_stopped for c in self._choices):
                    self.close(PromptOutcome.ERROR)
                    raise engine_silent() from None


class _Choice:
    """One prompt and its completion so far."""

    def __init__(
        self,
        index: int,
        request: EngineRequest,
        stops: tuple[str, ...],
        backend: Backend,
        began_seconds: float,
    ) -> None:
        self.index = index
        self.request = request
        self.is_open = False
        """Whether the request was submitted and its last output has not arrived."""
        self._backend = backend
        self._text = Detokenizer(backend.model.decode, request.prompt)
        self._stop = StopFinder(stops)
        self._num_tokens = 0
        self._last_seconds = began_seconds
        """Time of the last tokens, or of the start of the call before the first token."""
        self._usage: Usage | None = None
        """The usage in the output with the first token."""

    @property
    def is_stopped(self) -> bool:
        """Return whether a stop string was found, but the engine has not ended the request yet."""
        return self.is_open and self._stop.is_found

    def take(self, output: Output, seconds: float) -> Piece:
        """Convert an output to text; aborts the request if a stop string is found."""
        self.is_open = self.is_open and output.finish is None
        text = ""
        if not self._stop.is_found:
            self._note_time(output, seconds)
            self._num_tokens += len(output.token_ids)
            text = self._stop.push(self._text.push(self._without_end(output)))
            if output.finish is not None and not self._stop.is_found:
                text += self._stop.push(self._text.flush())
            if output.finish is not None and not self._stop.is_found:
                text += self._stop.flush()
            if self.is_stopped:
                self._backend.engine.abort(self.request.request_id)
        if output.finish is None:
            return Piece(self.index, text)
        return self._last_piece(text, output)

    def _without_end(self, output: Output) -> tuple[int, ...]:
        """Return the tokens of the text, without an end token."""
        tokens = output.token_ids
        ends = self._backend.model.eos_ids | self.request.stop_ids
        is_end = output.finish is FinishReason.STOP and tokens and tokens[-1] in ends
        return tokens[:-1] if is_end else tokens

    def close(self, outcome: PromptOutcome) -> None:
        """Abort if still open."""
        if self.is_open:
            self.is_open = False
            self._backend.engine.abort(self.request.request_id)
            self._backend.observer.finished(outcome)
        facts = {"completion_tokens": self._num_tokens}
        if self._usage is not None:
            facts["prompt_tokens"] = self._usage.prompt_tokens
            facts["computed_tokens"] = self._usage.computed_tokens
        TRACES.end(self.request.request_id, **facts)

    def _note_time(self, output: Output, seconds: float) -> None:
        if not output.token_ids:
            return
        observer, took_seconds = self._backend.observer, seconds - self._last_seconds
        if self._usage is None:
            assert output.usage is not None, "the engine's contract: the first one has the usage"
            self._usage = output.usage
            observer.first_token(took_seconds, self._usage)
            TRACES.record("first token", self.request.request_id, took_seconds)
        else:
            observer.token_gap(took_seconds, self._usage)
        self._last_seconds = seconds

    def _last_piece(self, text: str, output: Output) -> Piece:
        finish = output.finish
        assert finish is not None
        if self._stop.is_found and finish is not FinishReason.ERROR:
            finish = FinishReason.STOP
        if finish in {FinishReason.ERROR, FinishReason.ABORT}:
            _log.error(
                "request failed", request=output.request_id, finish=finish, error=output.error
            )
            self._backend.observer.finished(PromptOutcome.ERROR)
            # The server did not abort it, so the engine is stopping.
            is_failure = finish is FinishReason.ERROR and self._backend.engine.is_ready
            raise engine_failed() if is_failure else not_ready()
        usage = output.usage
        assert usage is not None, "the engine's contract: the last output carries the usage"
        if self._stop.is_found:
            # Exclude tokens that the engine generated before the abort.
            usage = replace(usage, completion_tokens=self._num_tokens)
        self._backend.observer.finished(PromptOutcome(finish.value))
        return Piece(self.index, text, finish, usage)
