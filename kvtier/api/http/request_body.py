"""Request bodies of the two OpenAI calls, checked field by field.

Parameters of OpenAI's API that this server does not implement are ignored if they cannot change the
answer. The others are refused unless they have a value that changes nothing. Unknown parameters are
refused, because they may be misspelled.
"""

import asyncio
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from starlette.requests import Request

from kvtier.api.http.errors import ApiError
from kvtier.api.http.limits import ServerLimits
from kvtier.core.limits import GAP_MAX_S, KIND_CHARACTERS_MAX, PRIORITY_MAX
from kvtier.engine.request import Hints

__all__ = [
    "ChatBody",
    "CompletionBody",
    "Message",
    "Prompt",
    "StreamOptions",
    "TransferParams",
    "parse_body",
    "parse_object",
    "read_body",
    "refuse_unsupported",
]

Prompt = str | list[int]
"""One prompt: text, or token ids that are not yet checked against the vocabulary."""

_STOP_CHARACTERS_MAX = 1024
"""Limits the text that is held back; real stop strings are much shorter."""

_SALT_CHARACTERS_MAX = 1024
"""A salt is a name or a secret."""


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


def _stop_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


def _prompt_list(value: object) -> list[Prompt]:
    """Return the prompts as a list, from any of OpenAI's four forms."""
    if isinstance(value, str) or (_is_token_ids(value) and value):
        value = [value]
    if not isinstance(value, list):
        raise _wrong("must be a string, a list of token ids, or a list of one of these")
    if not value or any(prompt in ("", []) for prompt in value):
        raise _wrong("must not be empty")
    if not (all(isinstance(p, str) for p in value) or all(_is_token_ids(p) for p in value)):
        raise _wrong("must be all strings or all lists of token ids")
    return value


def _content_text(value: object) -> str:
    """Return the text of a message; parts are joined with newlines, as in vLLM."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong('each part must be an object like {"type": "text", "text": "..."}')
        if part["type"] != "text":
            raise _wrong(f"parts of type {part['type']!r} are not supported (only text)")
        if not isinstance(part.get("text"), str):
            raise _wrong("the text of a text part must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _likelihood(value: object) -> float | None:
    """Return a probability that is given as a boolean or a number."""
    if value is None or isinstance(value, bool):
        return None if value is None else float(value)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise _wrong("must be true, false, or a number from 0 to 1")
    return float(value)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


_KIND = r"^[A-Za-z0-9._-]+$"


class TransferParams(_Strict):
    """Limits on the use of tiers for one request, and hints about its future use.

    The limits have the names and meaning of vLLM's.
    """

    max_offload_tokens: int | None = Field(None, ge=0)
    max_load_tokens: int | None = Field(None, ge=0)
    continues: Annotated[float | None, PlainValidator(_likelihood)] = None
    final: bool | None = None
    expected_gap_s: float | None = Field(None, ge=0, le=GAP_MAX_S)
    kind: str | None = Field(None, min_length=1, max_length=KIND_CHARACTERS_MAX, pattern=_KIND)
    priority: int | None = Field(None, ge=0, le=PRIORITY_MAX)
    ttl_s: float | None = Field(None, ge=0, le=GAP_MAX_S)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.final is not None and self.continues is not None:
            raise _wrong("final and continues cannot be used together")
        return self

    @property
    def hints(self) -> Hints:
        """Return the hints for the engine."""
        continues = self.continues
        if self.final is not None:
            continues = 0.0 if self.final else 1.0
        return Hints(
            kind=self.kind or "",
            continues=continues,
            gap_s=self.expected_gap_s,
            priority=self.priority or 0,
            ttl_s=self.ttl_s,
        )


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and ignored: padding that hides the length of chunks."""


class Message(BaseModel):
    """One message of a conversation, its content as text."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str = Field(min_length=1)
    content: Annotated[str, PlainValidator(_content_text)]
    name: str | None = None

    @property
    def for_template(self) -> dict[str, str]:
        """Return the fields for the chat template."""
        message = {"role": self.role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


_Stop = Annotated[str, Field(min_length=1, max_length=_STOP_CHARACTERS_MAX)]
_Stops = Annotated[list[_Stop], Field(max_length=4)]


class _Body(_Strict):
    """Fields of both calls."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[_Stops | None, BeforeValidator(_stop_list)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=_SALT_CHARACTERS_MAX)
    kv_transfer_params: TransferParams | None = None

    @property
    def has_usage_chunk(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(_Body):
    """The body of ``/v1/completions``."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompt_list)]

    @property
    def num_prompts(self) -> int:
        """Return the number of requested completions."""
        return len(self.prompt)


class ChatBody(_Body):
    """The body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def num_prompts(self) -> int:
        """Return the number of requested completions."""
        return 1


BodyT = TypeVar("BodyT", bound=_Body)


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Read a whole body. Raises ApiError as soon as it is too large or too slow."""
    too_large = ApiError(f"the request body is larger than {limits.body_bytes} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError("timed out reading the request body", status=408) from None
    return bytes(body)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return a body's fields; raises ApiError if it is not a JSON object."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the request body must be a JSON object")
    return body


def parse_body(raw: bytes, shape: type[BodyT]) -> BodyT:
    """Return the checked body; raises ApiError with the first invalid field."""
    body = parse_object(raw)
    refuse_unsupported(body, shape.model_fields)
    _refuse_message_extras(body)
    try:
        checked = shape.model_validate(
            {name: value for name, value in body.items() if name in shape.model_fields}
        )
    except ValidationError as error:
        raise _field_error(error) from None
    if checked.stream_options is not None and not checked.stream:
        raise ApiError("stream_options is allowed only with stream=true", param="stream_options")
    return checked


def _refuse_message_extras(body: Mapping[str, object]) -> None:
    """Refuse message fields that no template uses, unless they are empty: clients send many."""
    messages = body.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        for name, value in message.items() if isinstance(message, dict) else ():
            if name not in Message.model_fields and value not in (None, []):
                param = f"messages[{index}].{name}"
                raise ApiError(f"{param} is not supported", param=param)


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = param.removeprefix(".")
    match first["type"]:
        case "missing":
            message = f"{param} is required"
        case "extra_forbidden":
            message = f"unknown parameter: {param}"
        case "model_type":
            message = f"{param} must be an object"
        case _:
            message = f"{param}: {first['msg']}"
    return ApiError(message, param=param)


_IGNORED: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Values that change nothing, by parameter; null is always one of them."""


def refuse_unsupported(body: Mapping[str, object], carried_out: Collection[str]) -> None:
    """Raise ApiError for the first parameter that is unknown or not supported."""
    for name, value in body.items():
        if name in carried_out or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise ApiError(f"unknown parameter: {name}", param=name)
        if value is None or any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            continue
        shown = f"{name}={json.dumps(value)}" if isinstance(value, bool | int | float) else name
        only = " or ".join(f"{name}={json.dumps(neutral)}" for neutral in _NEUTRAL[name])
        limit = f" (only {only})" if only else ""
        raise ApiError(f"{shown} is not supported{limit}", param=name)


def _is_same(value: object, neutral: object) -> bool:
    """Compare as JSON does: ``0`` equals ``0.0``, but neither is ``false``."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
