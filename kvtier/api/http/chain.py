"""``POST /v1/kvtier/chain``: a prompt's block hashes, and where it diverges from recent prompts.

Tools that explain, pin or warm a prompt identify it by its block hashes. Only the engine can
compute them from text: it has the tokenizer, the chat template and the key space. It also knows
where a prompt first differs from the most similar recent one, the first question after a miss.

Rules
-----
* The prompt goes through the same functions as that of a completion.
* A prompt is compared only with prompts of its own tenant: the point where two prompts diverge
  would reveal one tenant's prompts to another.
* Recent prompts are kept as token ids, up to a limit in bytes. Only operators see how many tokens a
  prompt shares with them: anyone else could use that to guess them, token by token.
"""

import asyncio
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from kvtier.api.http.detokenizer import continuation
from kvtier.api.http.engine_call import read_chat, read_completion
from kvtier.api.http.errors import ApiError
from kvtier.api.http.limits import PromptLimiter, ServerLimits
from kvtier.api.http.request_body import (
    ChatBody,
    CompletionBody,
    parse_body,
    parse_object,
    read_body,
)
from kvtier.api.http.service import ChatModel, EngineService
from kvtier.api.http.tenant import TenantRules
from kvtier.core.identity import NO_TENANT, chain_root, hash_blocks, tenant_digest
from kvtier.engine.request import Deliver, EngineRequest

__all__ = ["ChainEndpoint", "ChainIdentity", "NearestPrompt", "PromptRecorder", "RecentPrompts"]

_RECENT_BYTES_MAX = 32 << 20
"""Memory for recent prompts: eight million tokens, or a thousand prompts of 8,000 tokens."""

_TENANTS_MAX = 1024
"""Maximum number of tenants with recent prompts; the least recently active is removed first."""

_NAMES = ("prompt", "messages", "token_ids")
_TEXT_BEFORE, _TEXT_AFTER = 8, 24
"""Tokens shown before and after the point where two prompts diverge."""

_Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ChainIdentity:
    """Inputs of this engine's block hashes besides tokens and salt."""

    key_space: bytes
    block_tokens: int


@dataclass(frozen=True, slots=True)
class NearestPrompt:
    """Result of comparing a prompt with the recent prompts of its tenant."""

    is_seen: bool
    """Whether a recent prompt starts with the whole prompt."""
    num_tokens: int
    """Length of the longest common prefix with a recent prompt that then differs or ends."""
    other: _Tokens = field(default_factory=lambda: np.empty(0, np.uint32))
    """Tokens of that prompt; empty if there is none."""


@dataclass(slots=True)
class _TenantPrompts:
    """The prompts of one tenant, oldest first."""

    prompts: deque[_Tokens] = field(default_factory=deque)
    num_bytes: int = 0


class RecentPrompts:
    """Token ids of recent prompts, by tenant. Thread-safe."""

    def __init__(self, bytes_max: int = _RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._by_tenant: OrderedDict[bytes, _TenantPrompts] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def note(self, tenant: bytes, prompt: Sequence[int]) -> None:
        """Add a prompt; the oldest one of the largest tenant is removed if there is no space."""
        tokens = _as_tokens(prompt)
        if tokens.nbytes > self._bytes_max:
            return
        with self._lock:
            own = self._by_tenant.setdefault(tenant, _TenantPrompts())
            self._by_tenant.move_to_end(tenant)
            own.prompts.append(tokens)
            own.num_bytes += tokens.nbytes
            self._num_bytes += tokens.nbytes
            while self._num_bytes > self._bytes_max:
                self._remove_oldest()
            while len(self._by_tenant) > _TENANTS_MAX:
                _, gone = self._by_tenant.popitem(last=False)
                self._num_bytes -= gone.num_bytes

    def nearest(self, tenant: bytes, prompt: Sequence[int]) -> NearestPrompt:
        """Compare a prompt with the recent ones of its tenant."""
        with self._lock:
            others = list(self._by_tenant.get(tenant, _TenantPrompts()).prompts)
        tokens = _as_tokens(prompt)
        is_seen, longest, other = False, 0, np.empty(0, np.uint32)
        for each in others:
            num_common = _num_common(tokens, each)
            if num_common == len(tokens):
                is_seen = True
            elif num_common >= longest:  # of equal ones, the latest
                longest, other = num_common, each
        return NearestPrompt(is_seen, longest, other)

    def _remove_oldest(self) -> None:
        tenant, most = max(self._by_tenant.items(), key=lambda item: item[1].num_bytes)
        gone_bytes = most.prompts.popleft().nbytes
        most.num_bytes -= gone_bytes
        self._num_bytes -= gone_bytes
        if not most.prompts:
            del self._by_tenant[tenant]


class PromptRecorder:
    """An engine that records each submitted prompt in ``recent``."""

    def __init__(self, inner: EngineService, recent: RecentPrompts) -> None:
        self._inner = inner
        self._recent = recent

    @property
    def is_ready(self) -> bool:
        """Return whether the engine accepts requests."""
        return self._inner.is_ready

    @property
    def is_stuck(self) -> bool:
        """Return whether the engine is stuck."""
        return self._inner.is_stuck

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Submit a request, and record its prompt if it was accepted."""
        self._inner.submit(request, deliver)
        self._recent.note(tenant_digest(request.cache_salt), request.prompt)

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self._inner.abort(request_id)


@dataclass(frozen=True, slots=True)
class ChainEndpoint:
    """The endpoint of ``POST /v1/kvtier/chain``."""

    identity: ChainIdentity
    recent: RecentPrompts
    model: ChatModel
    limiter: PromptLimiter
    limits: ServerLimits
    tenants: TenantRules

    async def answer(self, request: HttpRequest) -> Response:
        """Answer one request; its prompt counts towards the limit of open prompts."""
        key = self.tenants.key_of(request)
        is_operator = getattr(request.state, "is_operator", False)  # see UnixConnection
        with self.limiter.hold():
            raw = await read_body(request, self.limits)
            # In a thread: long texts and many recent prompts take time.
            document = await asyncio.to_thread(self._document, raw, key, is_operator=is_operator)
            return JSONResponse(document)

    def _document(self, raw: bytes, key: str, *, is_operator: bool) -> dict[str, Any]:
        prompt, salt, has_text = self._read(raw, key)
        tenant = tenant_digest(salt)
        document: dict[str, Any] = {
            "key_space": self.identity.key_space.hex(),
            "tenant": tenant.hex(),
            "block_tokens": self.identity.block_tokens,
            "num_tokens": len(prompt),
            "hashes": self._hashes(tenant, prompt),
            "unsalted": [] if tenant == NO_TENANT else self._hashes(NO_TENANT, prompt),
        }
        if is_operator:
            document |= self._comparison(tenant, prompt, has_text=has_text)
        elif has_text:
            raise _OPERATORS_ONLY
        return document

    def _comparison(
        self, tenant: bytes, prompt: Sequence[int], *, has_text: bool
    ) -> dict[str, Any]:
        nearest = self.recent.nearest(tenant, prompt)
        comparison: dict[str, Any] = {
            "is_seen": nearest.is_seen,
            "nearest_tokens": nearest.num_tokens,
            "has_nearest": bool(len(nearest.other)),
        }
        if has_text:
            comparison["text"] = self._texts(prompt, nearest)
        return comparison

    def _read(self, raw: bytes, key: str) -> tuple[tuple[int, ...], str | None, bool]:
        """Return the prompt's tokens, its salt, and whether text is requested."""
        body = parse_object(raw)
        has_text = body.pop("with_text", False)
        if not isinstance(has_text, bool):
            raise ApiError("with_text: must be true or false", param="with_text")
        named = [name for name in _NAMES if name in body]
        if len(named) != 1:
            raise ApiError(f"give exactly one of {', '.join(_NAMES)}")
        if named == ["token_ids"]:
            body["prompt"] = _token_ids(body.pop("token_ids"))
        whole = to_json({"model": self.model.model_id, "max_tokens": 1} | body)
        if named == ["messages"]:
            chat = parse_body(whole, ChatBody)
            call, salt = read_chat(chat, self.model), chat.cache_salt
        else:
            completion = parse_body(whole, CompletionBody)
            if completion.num_prompts != 1:
                raise ApiError("prompt: only one prompt per call", param="prompt")
            call, salt = read_completion(completion, self.model), completion.cache_salt
        return call.requests[0].prompt, self.tenants.salt_of(key, salt), has_text

    def _hashes(self, tenant: bytes, prompt: Sequence[int]) -> list[str]:
        root = chain_root(self.identity.key_space, tenant)
        return [each.hex() for each in hash_blocks(root, prompt, self.identity.block_tokens)]

    def _texts(self, prompt: Sequence[int], nearest: NearestPrompt) -> dict[str, str]:
        """Return both prompts around the point where they diverge."""
        at = nearest.num_tokens
        start, end = max(0, at - _TEXT_BEFORE), at + _TEXT_AFTER
        return {
            "before": continuation(self.model.decode, prompt[:start], prompt[start:at]),
            "here": continuation(self.model.decode, prompt[:at], prompt[at:end]),
            "there": continuation(self.model.decode, prompt[:at], nearest.other[at:end].tolist()),
        }


_OPERATORS_ONLY = ApiError(
    "with_text: recent prompts are shown only to operators; use the engine's Unix socket, as "
    "kvtier explain does on the engine's node",
    status=403,
    param="with_text",
    code="operators_only",
)


def _token_ids(value: object) -> object:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise ApiError("token_ids: must be a list of token ids", param="token_ids")
    return value


def _as_tokens(prompt: Sequence[int]) -> _Tokens:
    # Through array, because numpy takes three times as long to read a tuple of 128k numbers.
    return np.frombuffer(array("I", prompt), np.uint32)


def _num_common(tokens: _Tokens, other: _Tokens) -> int:
    """Return the length of the longest common prefix."""
    length = min(len(tokens), len(other))
    is_other = tokens[:length] != other[:length]
    return int(np.argmax(is_other)) if is_other.any() else length
