"""Interfaces that the HTTP server needs: an engine, a model and an observer."""

from collections.abc import Mapping, Set
from enum import StrEnum
from typing import Protocol

from kvtier.engine.request import Deliver, EngineRequest, Usage

__all__ = [
    "ChatModel",
    "EngineService",
    "NoObserver",
    "Observer",
    "PromptOutcome",
]


class EngineService(Protocol):
    """The engine, called from another thread.

    Contract
    --------
    * ``submit`` and ``abort`` return at once and may be called from any thread.
    * After ``submit``, ``deliver`` is called in order, on the engine's thread. Each output has
      at least one token or is the last; only the last one has a finish reason.
    * The first output with tokens has the usage, since the sources of the prompt's tokens are then
      known. So does the last one, unless its finish reason is ``error``.
    * ``abort`` ends an open request with ``FinishReason.ABORT``, and ignores any other. A stop
      ends all open requests, with ``abort`` or ``error``, once ``is_ready`` is false.
    """

    @property
    def is_ready(self) -> bool:
        """Return whether requests are accepted: false while loading and while stopping."""

    @property
    def is_stuck(self) -> bool:
        """Return whether work is queued but has made no progress for too long."""

    def submit(self, request: EngineRequest, deliver: Deliver) -> None:
        """Queue a request. Raises ``QueueFull`` (when stopping, too) or ``RequestRefused``."""

    def abort(self, request_id: str) -> None:
        """End a request early and free what it holds."""


class ChatModel(Protocol):
    """The text side of a model. Every method may be called from any thread."""

    @property
    def model_id(self) -> str:
        """Return the model's name in the API."""

    @property
    def context_limit(self) -> int:
        """Return the maximum number of tokens of a prompt and its completion together."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids; valid ids are below it."""

    @property
    def token_characters_max(self) -> int:
        """Return the largest number of characters in one token."""

    @property
    def eos_ids(self) -> Set[int]:
        """Return the ids of end tokens."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the ids of the tokens that ``decode`` leaves out, by name."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special ones that the model starts with."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens; special ones are left out, broken UTF-8 is U+FFFD."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the prompt for a conversation; raises ``ValueError`` if refused."""


class PromptOutcome(StrEnum):
    """How a prompt ended; the values are metric labels."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The client disconnected."""
    ERROR = "error"
    """The engine failed."""
    REFUSED = "refused"
    """The prompt never reached the engine."""


class Observer(Protocol):
    """Counts events. Called on the server's loop; must not block or raise."""

    def first_token(self, seconds: float, usage: Usage) -> None:
        """Record the time to first token."""

    def token_gap(self, seconds: float, usage: Usage) -> None:
        """Record the time between two outputs with tokens, and the usage of the first one."""

    def finished(self, outcome: PromptOutcome) -> None:
        """Record the end of one prompt."""


class NoObserver:
    """An observer that counts nothing."""

    def first_token(self, seconds: float, usage: Usage) -> None:
        """Ignore it."""

    def token_gap(self, seconds: float, usage: Usage) -> None:
        """Ignore it."""

    def finished(self, outcome: PromptOutcome) -> None:
        """Ignore it."""
