"""The bounds of the HTTP server: every wait has a deadline, every queue an end."""

from dataclasses import dataclass

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one server takes from its clients."""

    body_bytes: int = 16 << 20
    """A million token ids in JSON are about 7 MB; anything far beyond is a mistake."""
    body_seconds: float = 30.0
    """A client that trickles its body would hold a place for ever."""
    send_seconds: float = 60.0
    """A client that reads nothing for this long is treated as gone."""
    silence_seconds: float = 10.0
    """After this long without an output, ask whether the engine is stuck."""
    open_prompts: int = 256
    """Prompts read, queued or running; beyond it clients are told to come back."""
    prompts_per_call: int = 64
    """One call must not take every place."""
