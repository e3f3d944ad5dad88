"""What a user says of the connector: vLLM's ``kv_connector_extra_config``.

All of it is checked when vLLM starts. What makes no sense is refused with the key's name, and vLLM
serves without a cache.
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
"""The second is the daemon's own, for what shares an environment with it."""
_SOCKET_BYTES_MAX = 101
"""As the daemon's: Linux takes 107, and the arena's name is longer."""

_DEADLINES_MS: Mapping[str, tuple[int, int]] = {
    "lookup_timeout_ms": (250, 10_000),
    "load_timeout_ms": (5_000, 60_000),
    "store_timeout_ms": (5_000, 60_000),
}
"""The default of each, and the most."""

_KEYS = ("socket", "only", *_DEADLINES_MS)

_RECONNECT_S = 1.0

_TOKENS_MAX = 2**32 - 1
"""A message carries no more, and no prompt has more."""


class Role(StrEnum):
    """What an engine does with blocks."""

    BOTH = "both"
    STORE = "store"
    LOAD = "load"

    @property
    def loads(self) -> bool:
        """Tell whether it asks for blocks."""
        return self is not Role.STORE

    @property
    def stores(self) -> bool:
        """Tell whether it offers blocks."""
        return self is not Role.LOAD


@dataclass(frozen=True, slots=True)
class Settings:
    """All of it, checked."""

    socket: Path
    role: Role
    deadlines: ClientDeadlines


def why_kept() -> str:
    """Answer an order to empty vLLM's own cache, which a connector cannot."""
    return (
        "vLLM alone can empty its own cache: POST /reset_prefix_cache to it (there with "
        "VLLM_SERVER_DEV_MODE=1), or start it again"
    )


def read_settings(
    extra: Mapping[str, object], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read what a user says. Raises ConfigError."""
    for key in extra:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(_KEYS)}"
            raise ConfigError(f"{_SECTION}.{key}", "there is no such key", remedy)
    seconds = {key: _milliseconds(key, extra) / 1000 for key in _DEADLINES_MS}
    deadlines = ClientDeadlines(
        lookup_s=seconds["lookup_timeout_ms"],
        load_s=seconds["load_timeout_ms"],
        store_s=seconds["store_timeout_ms"],
        reconnect_s=_RECONNECT_S,
    )
    return Settings(_socket(extra, environment), _role(extra), deadlines)


def traits_of(request: Any) -> RequestTraits:
    """Return what a client said of a request, as far as it makes sense."""
    params = request.kv_transfer_params or {}
    named = RequestTraits(request_id=request.request_id)
    return RequestTraits(
        # It is for explanations only, and clients have a say in it: one that no message can carry
        # is left out.
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
    """Return the daemon's socket: as given, or where a daemon of this environment listens."""
    named = next(filter(environment.get, _SOCKET_VARIABLES), None)
    key, given = f"{_SECTION}.socket", extra.get("socket")
    if "socket" not in extra:
        key = f"${named}" if named else key
        given = environment[named] if named else str(default_socket(environment))
    if not isinstance(given, str) or not Path(given).name:
        problem = f"{given!r} is no path of a socket"
        raise ConfigError(key, problem, "name the daemon's, as daemon.socket does")
    if len(os.fsencode(given)) > _SOCKET_BYTES_MAX:
        problem = f"{given} has {len(os.fsencode(given))} bytes"
        raise ConfigError(key, problem, f"{_SOCKET_BYTES_MAX} is the most")
    return Path(given)


def _milliseconds(key: str, extra: Mapping[str, object]) -> int:
    usual, most = _DEADLINES_MS[key]
    value = extra.get(key, usual)
    if type(value) is not int or not 1 <= value <= most:
        problem = f"{value!r} is no number of milliseconds"
        raise ConfigError(f"{_SECTION}.{key}", problem, f"give an integer from 1 to {most}")
    return value


def _tokens(value: object) -> int | None:
    """Return a number of tokens that a client gave; what is none counts as not given."""
    return min(value, _TOKENS_MAX) if type(value) is int and value >= 0 else None
