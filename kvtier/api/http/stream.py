"""A generation as server-sent events."""

from collections.abc import AsyncGenerator

from kvtier.api.http.error import ApiError, engine_failed
from kvtier.api.http.generation import Generation, Piece
from kvtier.api.http.reply import DONE_EVENT, ApiReply, Json, event
from kvtier.observe.log import Log

__all__ = ["events"]

_log = Log("kvtier.http")


async def events(generation: Generation, reply: ApiReply) -> AsyncGenerator[bytes]:
    """Yield a stream's events to its end; what goes wrong becomes an event, too.

    The first chunk of a choice comes with its first text and not before, so that what a client
    measures as time to first token is that.
    """
    try:
        async for chunk in _chunks(generation, reply):
            yield event(chunk)
    except ApiError as error:
        yield error.event()
    except Exception:
        _log.exception("a stream failed", request=generation.call.requests[0].request_id)
        yield engine_failed().event()
    yield DONE_EVENT


async def _chunks(generation: Generation, reply: ApiReply) -> AsyncGenerator[Json]:
    # As OpenAI does: with a usage chunk to come, every other chunk says that it is not the one.
    no_usage: Json = {"usage": None} if generation.call.has_usage_chunk else {}
    started: set[int] = set()
    last: list[Piece] = []
    async for piece in generation.pieces():
        if piece.text:
            is_first = piece.index not in started
            started.add(piece.index)
            yield reply.chunk(piece.index, piece.text, is_first=is_first) | no_usage
        if piece.finish is not None:
            last.append(piece)
            is_first = piece.index not in started
            yield reply.chunk(piece.index, "", piece.finish, is_first=is_first) | no_usage
    if generation.call.has_usage_chunk:
        last.sort(key=lambda piece: piece.index)
        yield reply.usage_chunk(last)
