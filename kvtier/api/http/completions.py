"""Endpoints of the two OpenAI calls; requests are aborted if the client disconnects."""

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
    (b"x-accel-buffering", b"no"),  # otherwise nginx buffers the stream
)


@dataclass(frozen=True, slots=True)
class CompletionEndpoint(Generic[BodyT]):
    """The endpoint of one call, as an ASGI application.

    It sends responses itself, because a response object that the framework sends later could not be
    abandoned while it is being created.
    """

    body_shape: type[BodyT]
    read_call: Callable[[BodyT, ChatModel], EngineCall]
    reply_shape: Shape
    backend: Backend
    limiter: PromptLimiter
    limits: ServerLimits
    tenants: TenantRules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with ExitStack() as exits:
            try:
                generation = await self._begin(exits, Request(scope, receive))
                await _unless_disconnected(receive, self._answer(generation, send))
            except ClientDisconnect:
                return  # leaving ``exits`` aborts the request

    async def _begin(self, exits: ExitStack, request: Request) -> Generation:
        """Read a call and submit it. Raises ApiError if it is refused."""
        began_seconds = self.backend.clock()
        try:
            key = self.tenants.key_of(request)
            if not self.backend.engine.is_ready:
                raise not_ready()
            slots = exits.enter_context(self.limiter.hold())
            raw = await read_body(request, self.limits)
            # In a thread, because tokenizing a long text would delay other streams.
            call = await _unless_disconnected(
                request.receive, asyncio.to_thread(self._read, raw, key)
            )
            slots.widen(len(call.requests))
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
        self.limiter.check(body.num_prompts)
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
        """Send a message; a client that does not read it in time counts as disconnected."""
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


async def _unless_disconnected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Do the work, but cancel it and raise ClientDisconnect once the client disconnects."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        disconnecting.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Return when the client disconnects; its body has already been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
