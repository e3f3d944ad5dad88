"""One exchange with a client: body in, answer or stream out, aborted if the client leaves."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from kvtier.api.http.engine_call import EngineCall
from kvtier.api.http.errors import ApiError, not_ready
from kvtier.api.http.generation import Backend, Generation, Piece
from kvtier.api.http.limits import PromptLimiter, ServerLimits
from kvtier.api.http.openai_response import ApiResponse, Json, Shape, events
from kvtier.api.http.request_body import ChatBody, CompletionBody, parse_body, read_body
from kvtier.api.http.service import ChatModel, PromptOutcome
from kvtier.api.http.tenant import TenantRules

__all__ = ["CompletionEndpoint"]

BodyT = TypeVar("BodyT", CompletionBody, ChatBody)
T = TypeVar("T")

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect a stream before passing it on
)


@dataclass(frozen=True, slots=True)
class CompletionEndpoint(Generic[BodyT]):
    """The endpoint of one kind of call, as an ASGI application.

    It sends by itself: a response object that the framework sends later could not be given up
    while it is still being made.
    """

    body_shape: type[BodyT]
    read_call: Callable[[BodyT, ChatModel], EngineCall]
    reply_shape: Shape
    backend: Backend
    gate: PromptLimiter
    limits: ServerLimits
    tenants: TenantRules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with ExitStack() as exits:
            try:
                generation = await self._begin(exits, Request(scope, receive))
                await _unless_gone(receive, self._answer(generation, send))
            except ClientDisconnect:
                return  # leaving ``exits`` aborts what has begun

    async def _begin(self, exits: ExitStack, request: Request) -> Generation:
        """Take a call in and submit it; whatever is refused is refused here."""
        began_seconds = self.backend.clock()
        try:
            key = self.tenants.key_of(request)
            if not self.backend.engine.is_ready:
                raise not_ready()
            place = exits.enter_context(self.gate.enter())
            raw = await read_body(request, self.limits)
            # In a thread: a long text takes as long to tokenize as many tokens of other streams.
            call = await _unless_gone(request.receive, asyncio.to_thread(self._read, raw, key))
            place.widen(len(call.requests))
            traceparent = request.headers.get("traceparent", "")
            generation = Generation(call, self.backend, began_seconds, traceparent)
            exits.enter_context(closing(generation))
            generation.start()
        except ApiError:
            self.backend.observer.finished(PromptOutcome.REFUSED)
            raise
        return generation

    def _read(self, raw: bytes, key: str) -> EngineCall:
        body = parse_body(raw, self.body_shape)
        self.gate.check(body.num_prompts)
        salt = self.tenants.salt_of(key, body.cache_salt)
        return self.read_call(body.model_copy(update={"cache_salt": salt}), self.backend.model)

    async def _answer(self, generation: Generation, send: Send) -> None:
        call = generation.call
        created_seconds = int(time.time())
        reply = ApiResponse(
            self.reply_shape, call.call_id, self.backend.model.model_id, created_seconds
        )
        if call.is_stream:
            await self._send_stream(generation, reply, send)
        else:
            response = JSONResponse(await _whole(generation, reply))
            headers = response.raw_headers
            await self._send(
                send, {"type": "http.response.start", "status": 200, "headers": headers}
            )
            await self._send(send, {"type": "http.response.body", "body": response.body})

    async def _send_stream(self, generation: Generation, reply: ApiResponse, send: Send) -> None:
        await self._send(
            send, {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
        )
        async with aclosing(events(generation, reply)) as stream:
            async for event in stream:
                body = {"type": "http.response.body", "body": event, "more_body": True}
                await self._send(send, body)
        await self._send(send, {"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, message: Message) -> None:
        """Send, waiting for a slow reader only so long; then it counts as gone."""
        try:
            async with asyncio.timeout(self.limits.send_seconds):
                await send(message)
        except TimeoutError:
            raise ClientDisconnect from None


async def _whole(generation: Generation, reply: ApiResponse) -> Json:
    num_choices = len(generation.call.requests)
    texts: list[list[str]] = [[] for _ in range(num_choices)]
    last: dict[int, Piece] = {}
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.index].append(piece.text)
            if piece.finish is not None:
                last[piece.index] = piece
    return reply.whole(["".join(parts) for parts in texts], [last[i] for i in range(num_choices)])


async def _unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Do the work, or cancel it and raise ``ClientDisconnect`` as soon as the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    """Return when the client has gone; its body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
