"""Converts API calls to engine requests: tokenizes prompts and checks the model's limits."""

from dataclasses import dataclass
from uuid import uuid4

from kvtier.api.http.errors import ApiError
from kvtier.api.http.request_body import ChatBody, CompletionBody, Prompt
from kvtier.api.http.service import ChatModel
from kvtier.engine.chat_template import MessageRefused
from kvtier.engine.request import NO_HINTS, EngineRequest, Sampling

__all__ = ["EngineCall", "read_chat", "read_completion"]

_COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's default for completions; a chat is limited only by the context length."""


@dataclass(frozen=True, slots=True)
class EngineCall:
    """The engine requests of one call, one per prompt, and how to respond."""

    call_id: str
    requests: tuple[EngineRequest, ...]
    stops: tuple[str, ...]
    is_stream: bool
    has_usage_chunk: bool


def read_completion(body: CompletionBody, model: ChatModel) -> EngineCall:
    """Convert a completions body. Tokenizes, which is slow for long texts."""
    _check_model(body, model)
    prompts = [_tokens(prompt, model) for prompt in body.prompt]
    asked = body.max_tokens
    return _call(body, model, "cmpl", prompts, asked=asked, default=_COMPLETION_TOKENS_DEFAULT)


def read_chat(body: ChatBody, model: ChatModel) -> EngineCall:
    """Convert a chat body. Tokenizes, which is slow for long texts."""
    _check_model(body, model)
    _check_length(sum(len(message.content) for message in body.messages), model, "messages")
    try:
        prompt = model.apply_chat_template([message.for_template for message in body.messages])
    except MessageRefused as error:
        raise ApiError(str(error), param=error.param) from error
    except ValueError as error:
        # The template's message is meant for the client, but one line is enough.
        reason = (str(error).splitlines() or ["refused"])[0][:200]
        raise ApiError(f"messages: {reason}", param="messages") from error
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _call(body, model, "chatcmpl", [prompt], asked=asked, default=model.context_limit)


def _check_model(body: CompletionBody | ChatBody, model: ChatModel) -> None:
    if body.model != model.model_id:
        raise ApiError(
            f"model {body.model!r} not found; this server serves {model.model_id!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _tokens(prompt: Prompt, model: ChatModel) -> list[int]:
    if isinstance(prompt, str):
        _check_length(len(prompt), model, "prompt")
        return model.encode(prompt)
    vocab_size = model.vocab_size
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            raise ApiError(
                f"prompt: token id {token_id} is not in the vocabulary; the largest id is "
                f"{vocab_size - 1}",
                param="prompt",
            )
    return prompt


def _check_length(num_characters: int, model: ChatModel, param: str) -> None:
    """Refuse a text that cannot fit, however it is tokenized.

    Tokenizing the longest body takes half a minute and gigabytes, while others wait.
    """
    if num_characters > model.context_limit * model.token_characters_max:
        raise ApiError(
            f"this model's maximum context length is {model.context_limit} tokens, "
            f"but the text has {num_characters} characters",
            param=param,
            code="context_length_exceeded",
        )


def _call(
    body: CompletionBody | ChatBody,
    model: ChatModel,
    prefix: str,
    prompts: list[list[int]],
    *,
    asked: int | None,
    default: int,
) -> EngineCall:
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    call_id = f"{prefix}-{uuid4().hex}"
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
    )
    stops = tuple(body.stop or ())
    # Special tokens have no text, so stop strings are matched by token id.
    special = model.special_tokens
    stop_ids = frozenset(special[stop] for stop in stops if stop in special)
    transfer = body.kv_transfer_params
    requests = []
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ApiError(f"{param}: must not be empty", param=param)
        room = model.context_limit - len(prompt)
        if room < (asked or 1):
            raise _too_long(model.context_limit, len(prompt), asked, param)
        request = EngineRequest(
            request_id=f"{call_id}-{index}",
            prompt=tuple(prompt),
            max_tokens=asked or min(default, room),
            sampling=sampling,
            stop_ids=stop_ids,
            cache_salt=body.cache_salt,
            max_offload_tokens=transfer.max_offload_tokens if transfer else None,
            max_load_tokens=transfer.max_load_tokens if transfer else None,
            hints=transfer.hints if transfer else NO_HINTS,
        )
        requests.append(request)
    return EngineCall(call_id, tuple(requests), stops, bool(body.stream), body.has_usage_chunk)


def _too_long(context_limit: int, num_prompt: int, asked: int | None, param: str) -> ApiError:
    """Return the error with both numbers; the output length is never silently reduced."""
    requested = f"{num_prompt} in the prompt"
    if asked is not None:
        requested += f" and {asked} to generate"
    return ApiError(
        f"this model's maximum context length is {context_limit} tokens, "
        f"but this call needs {requested}",
        param=param,
        code="context_length_exceeded",
    )
