"""What the daemon tells operators, as the operator's service asks for it."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from kvtier.core.residency import TierName

__all__ = ["ExplainQuestion", "OperatorReports"]


@dataclass(frozen=True, slots=True)
class ExplainQuestion:
    """What is to be explained: a request, a chain, or a request together with its chain."""

    request_id: str
    key_space: bytes
    tenant: bytes
    hashes: bytes
    num_tokens: int = 0
    """Of the whole prompt; 0: unknown."""
    unsalted: bytes = b""
    """The same tokens' block hashes without the salt, or under another one."""


@dataclass(frozen=True, slots=True)
class OperatorReports:
    """Each makes one of the stable documents that a command prints with ``--json``."""

    stat: Callable[[], dict[str, Any]]
    explain: Callable[[ExplainQuestion], dict[str, Any] | None]
    """None: the request is not known."""
    probe: Callable[[tuple[TierName, ...]], Awaitable[dict[str, Any]]]
    """Measures these tiers; none given: all there are."""
    hold_probe: Callable[[], AbstractAsyncContextManager[None]]
    """While it is open nothing is measured."""
    reload: Callable[[], Awaitable[dict[str, Any]]]
    """Reads the configuration again, and applies it."""
    config: Callable[[], dict[str, Any]]
