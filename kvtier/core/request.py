"""What a client says of a request besides its tokens: hints, wishes and limits."""

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["NO_TRAITS", "LoadPurpose", "RequestTraits"]


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """Everything has a default, so that a client that says nothing is served as well."""

    request_id: str = ""
    """Names the request in explanations; a lookup that is repeated under it counts once."""
    num_tokens: int = 0
    """Of the whole prompt, with the tokens behind its last full block; 0: unknown."""
    kind: str = ""
    """A word of the client for requests of one sort (``chat``, ``agent``), to tell them apart."""
    continues: float | None = None
    """How likely this chain is asked for again, 0 to 1; 0: it is final; None: nothing is said."""
    gap_s: float | None = None
    """When that will be, about, in seconds from now."""
    priority: int = 0
    """0: as any other; 1 and more: kept before others, within the budget for that."""
    ttl_s: float | None = None
    """Its blocks are kept that long, within the budget for that."""
    max_offload_tokens: int | None = None
    """Exactly so many leading tokens are taken, rounded down to blocks; 0: none."""
    max_load_tokens: int | None = None
    """At most so many tokens are restored, rounded down to blocks; 0: none."""


NO_TRAITS = RequestTraits()
"""Of a request of which nothing is said."""


class LoadPurpose(Enum):
    """Blocks that one call holds and another copies are counted once, each half where it is done.

    vLLM must know what it will get before it has room for it: its scheduler holds, a worker copies.
    """

    COPY = auto()
    """Bring blocks up and copy them."""
    HOLD = auto()
    """Bring them up, for somebody who copies them later."""
    COPY_HELD = auto()
    """Copy what was brought up so."""

    @property
    def brings(self) -> bool:
        """Tell whether it is this load that brings blocks up."""
        return self is not LoadPurpose.COPY_HELD

    @property
    def copies(self) -> bool:
        """Tell whether it is this load that copies them."""
        return self is not LoadPurpose.HOLD
