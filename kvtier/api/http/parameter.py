"""Parameters of OpenAI's API that this server knows but does not carry out.

One that would change the answer is refused unless it has the value that changes nothing; one that
would not is ignored; one that nobody has heard of is refused, since it may be a misspelt one.
"""

from collections.abc import Collection, Mapping
from typing import Final

from kvtier.api.http.error import ApiError

__all__ = ["refuse_unsupported"]

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
"""By name the values that ask for what happens anyway; null is always one of them."""


def refuse_unsupported(body: Mapping[str, object], carried_out: Collection[str]) -> None:
    """Raise ``ApiError`` for the first parameter that would not get what it asks for."""
    for name, value in body.items():
        if name in carried_out or name in _IGNORED:
            continue
        if name not in _NEUTRAL:
            raise ApiError(f"{name} is not a parameter of this call", param=name)
        if value is None or any(_is_same(value, neutral) for neutral in _NEUTRAL[name]):
            continue
        raise ApiError(f"{name} is not supported with this value; leave it out", param=name)


def _is_same(value: object, neutral: object) -> bool:
    """Compare as JSON does: ``0`` equals ``0.0``, but neither is ``false``."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
