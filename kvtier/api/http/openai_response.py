"""Responses in OpenAI's format, whole and as server-sent events."""

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from kvtier.api.http.errors import ApiError, engine_failed
from kvtier.api.http.generation import Generation, Piece
from kvtier.core.residency import TierName
from kvtier.engine.request import FinishReason, Usage
from kvtier.observe.log import Log

__all__ = [
    "CHAT",
    "COMPLETION",
    "DONE_EVENT",
    "ApiResponse",
    "Json",
    "Shape",
    "event",
    "events",
]

Json = dict[str, object]

DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of every stream."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts that differ between the responses of OpenAI's two calls."""

    whole_kind: str
    chunk_kind: str
    whole_choice: Callable[[str], Json]
    """Returns the part of a choice with its whole text."""
    chunk_choice: Callable[[str, bool], Json]
    """Returns the part of a choice with its next text; true for the first chunk of the choice."""


def _completion_choice(text: str) -> Json:
    return {"text": text}


def _completion_chunk_choice(text: str, _is_first: bool) -> Json:
    return {"text": text}


def _chat_choice(text: str) -> Json:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _chat_chunk_choice(text: str, is_first: bool) -> Json:
    if is_first:
        return {"delta": {"role": "assistant", "content": text}}
    return {"delta": {"content": text} if text else {}}


COMPLETION = Shape(
    "text_completion", "text_completion", _completion_choice, _completion_chunk_choice
)
"""Responses of ``/v1/completions``."""

CHAT = Shape("chat.completion", "chat.completion.chunk", _chat_choice, _chat_chunk_choice)
"""Responses of ``/v1/chat/completions``."""


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """Formats one response, whole or in chunks."""

    shape: Shape
    call_id: str
    model_id: str
    created_seconds: int

    def whole(self, texts: Sequence[str], last: Sequence[Piece]) -> Json:
        """Return a whole response from the text and last piece of each choice."""
        choices = [
            {
                "index": piece.index,
                **self.shape.whole_choice(text),
                "logprobs": None,
                "finish_reason": piece.finish,
            }
            for text, piece in zip(texts, last, strict=True)
        ]
        return {**self._envelope(self.shape.whole_kind), "choices": choices, **_usage(last)}

    def chunk(
        self, index: int, text: str, finish: FinishReason | None = None, *, is_first: bool = False
    ) -> Json:
        """Return a chunk of one choice."""
        choice = {
            "index": index,
            **self.shape.chunk_choice(text, is_first),
            "logprobs": None,
            "finish_reason": finish,
        }
        return {**self._envelope(self.shape.chunk_kind), "choices": [choice]}

    def usage_chunk(self, last: Sequence[Piece]) -> Json:
        """Return the last chunk of a stream: the usage and no choices."""
        return {**self._envelope(self.shape.chunk_kind), "choices": [], **_usage(last)}

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.call_id,
            "object": kind,
            "created": self.created_seconds,
            "model": self.model_id,
        }


def event(body: Json) -> bytes:
    """Return one event of a stream."""
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def _usage(last: Sequence[Piece]) -> Json:
    usages = [piece.usage for piece in last if piece.usage is not None]
    assert len(usages) == len(last), "the last piece carries the usage"
    total = _sum(usages)
    return {
        "usage": {
            "prompt_tokens": total.prompt_tokens,
            "completion_tokens": total.completion_tokens,
            "total_tokens": total.prompt_tokens + total.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": total.tier_tokens.total()},
        },
        "kvtier": {
            "tier_tokens": {tier.value: total.tier_tokens[tier] for tier in TierName},
            "computed_tokens": total.computed_tokens,
            "decision": total.decision,
        },
    }


def _sum(usages: Sequence[Usage]) -> Usage:
    """Return the total usage of all prompts; different decisions are listed in order."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        tier_tokens=sum((usage.tier_tokens for usage in usages), Counter[TierName]()),
        computed_tokens=sum(usage.computed_tokens for usage in usages),
        decision=",".join(dict.fromkeys(usage.decision for usage in usages)),
    )


_log = Log("kvtier.http")


async def events(generation: Generation, reply: ApiResponse) -> AsyncGenerator[bytes]:
    """Yield the events of a stream; an error becomes an event, too.

    The first chunk of a choice contains its first text, so that clients measure the time to first
    token correctly.
    """
    try:
        async for chunk in _chunks(generation, reply):
            yield event(chunk)
    except ApiError as error:
        yield error.event()
    except Exception:
        _log.exception("streaming failed", request=generation.call.requests[0].request_id)
        yield engine_failed().event()
    yield DONE_EVENT


async def _chunks(generation: Generation, reply: ApiResponse) -> AsyncGenerator[Json]:
    # As in OpenAI's API: if a usage chunk follows, all other chunks have ``"usage": null``.
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
