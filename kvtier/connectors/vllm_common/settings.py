"""Settings of the vLLM connectors, set by users, and traits of requests, set by clients.

``kv_connector_extra_config`` is validated when vLLM starts. An invalid key is reported by its name,
and vLLM serves without a cache.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvtier.client import ClientDeadlines
from kvtier.config.model import default_socket
from kvtier.core.request import RequestTraits
from kvtier.errors import ConfigError
from kvtier.wire.convert import traits_fault

__all__ = ["Role", "Settings", "read_settings", "traits_of", "why_kept"]

_SECTION = "kv_connector_extra_config"
_SOCKET_VARIABLES = ("KVTIER_SOCKET", "KVTIER_DAEMON_SOCKET")
"""The second is the daemon's own, for processes that share its environment."""
_SOCKET_BYTES_MAX = 101
"""The daemon's limit: Linux allows 107, and the arena's path is longer."""

_DEADLINES_MS: Mapping[str, tuple[int, int]] = {
    "lookup_timeout_ms": (250, 10_000),
    "load_timeout_ms": (5_000, 60_000),
    "store_timeout_ms": (5_000, 60_000),
}
"""Default and maximum of each, in milliseconds."""

_KEYS = ("socket", "only", *_DEADLINES_MS)

_RECONNECT_S = 1.0

_TOKENS_MAX = 2**32 - 1
"""The largest number that fits into a message; no prompt has more tokens."""


class Role(StrEnum):
    """Whether an engine stores blocks, loads them, or both."""

    BOTH = "both"
    STORE = "store"
    LOAD = "load"

    @property
    def loads(self) -> bool:
        """Return whether it loads blocks."""
        return self is not Role.STORE

    @property
    def stores(self) -> bool:
        """Return whether it stores blocks."""
        return self is not Role.LOAD


@dataclass(frozen=True, slots=True)
class Settings:
    """Validated settings of a connector."""

    socket: Path
    role: Role
    deadlines: ClientDeadlines


def why_kept() -> str:
    """Explain why a connector cannot follow an order to empty vLLM's own cache."""
    return (
        "vLLM alone can empty its own cache: POST /reset_prefix_cache to it (there with "
        "VLLM_SERVER_DEV_MODE=1), or start it again"
    )


def read_settings(
    extra: Mapping[str, object], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read and validate ``kv_connector_extra_config``. Raises ConfigError."""
    for key in extra:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]}?" if near else f"valid keys are {', '.join(_KEYS)}"
            raise ConfigError(f"{_SECTION}.{key}", "no such key", remedy)
    seconds = {key: _milliseconds(key, extra) / 1000 for key in _DEADLINES_MS}
    deadlines = ClientDeadlines(
        lookup_s=seconds["lookup_timeout_ms"],
        load_s=seconds["load_timeout_ms"],
        store_s=seconds["store_timeout_ms"],
        reconnect_s=_RECONNECT_S,
    )
    return Settings(_socket(extra, environment), _role(extra), deadlines)


def traits_of(request: Any) -> RequestTraits:
    """Return the traits that a client set for a request; invalid ones are left out."""
    params = request.kv_transfer_params or {}
    named = RequestTraits(request_id=request.request_id)
    return RequestTraits(
        # Only used in explanations. Clients can choose it; an id that fits no message is left out.
        request_id="" if traits_fault(named) else request.request_id,
        num_tokens=request.num_tokens,
        max_offload_tokens=_tokens(params.get("max_offload_tokens")),
        max_load_tokens=_tokens(params.get("max_load_tokens")),
    )


def _role(extra: Mapping[str, object]) -> Role:
    only = extra.get("only")
    if only not in (None, Role.STORE, Role.LOAD):
        problem, remedy = f"{only!r} is not known", "use store or load, or leave it out for both"
        raise ConfigError(f"{_SECTION}.only", problem, remedy)
    return Role(str(only)) if only else Role.BOTH


def _socket(extra: Mapping[str, object], environment: Mapping[str, str]) -> Path:
    """Return the daemon's socket: as set, or the default in this environment."""
    named = next(filter(environment.get, _SOCKET_VARIABLES), None)
    key, given = f"{_SECTION}.socket", extra.get("socket")
    if "socket" not in extra:
        key = f"${named}" if named else key
        given = environment[named] if named else str(default_socket(environment))
    if not isinstance(given, str) or not Path(given).name:
        problem = f"{given!r} is not a socket path"
        raise ConfigError(key, problem, "use the value of daemon.socket")
    if len(os.fsencode(given)) > _SOCKET_BYTES_MAX:
        problem = f"{given} has {len(os.fsencode(given))} bytes"
        raise ConfigError(key, problem, f"use at most {_SOCKET_BYTES_MAX}")
    return Path(given)


def _milliseconds(key: str, extra: Mapping[str, object]) -> int:
    usual, most = _DEADLINES_MS[key]
    value = extra.get(key, usual)
    if type(value) is not int or not 1 <= value <= most:
        problem = f"{value!r} is not a number of milliseconds"
        raise ConfigError(f"{_SECTION}.{key}", problem, f"give an integer from 1 to {most}")
    return value


def _tokens(value: object) -> int | None:
    """Return a client's number of tokens; None if it is not a valid number."""
    return min(value, _TOKENS_MAX) if type(value) is int and value >= 0 else None
