"""The attributes that a client gives a request, and the purpose of a load."""

from dataclasses import dataclass
from enum import Enum, auto

__all__ = ["NO_TRAITS", "LoadPurpose", "RequestTraits"]


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """Attributes of a request. All have defaults: a client does not have to set any."""

    request_id: str = ""
    """Name of the request in explanations. Repeated lookups under the same id count once."""
    num_tokens: int = 0
    """Length of the whole prompt, including tokens after its last full block; 0 if unknown."""
    kind: str = ""
    """The client's label for this kind of request, such as ``chat`` or ``agent``."""
    continues: float | None = None
    """Probability that this chain is requested again, 0 to 1; None if unknown."""
    gap_s: float | None = None
    """Expected time until then, in seconds."""
    priority: int = 0
    """1 and more: blocks are kept before those of other requests, within the budget for that."""
    ttl_s: float | None = None
    """How long blocks are kept, in seconds, within the same budget."""
    max_offload_tokens: int | None = None
    """Offload exactly this many leading tokens, rounded down to blocks; 0: none."""
    max_load_tokens: int | None = None
    """Restore at most this many tokens, rounded down to blocks; 0: none."""


NO_TRAITS = RequestTraits()
"""The traits of a request for which the client gives none."""


class LoadPurpose(Enum):
    """Whether a load promotes blocks, copies them, or both; each half is counted where it happens.

    vLLM must know what it will get before it has room for it: its scheduler holds the blocks, and
    a worker copies them later.
    """

    COPY = auto()
    """Promote blocks and copy them."""
    HOLD = auto()
    """Promote blocks for another call that copies them later."""
    COPY_HELD = auto()
    """Copy blocks that an earlier call holds."""

    @property
    def brings(self) -> bool:
        """Return whether this load promotes blocks."""
        return self is not LoadPurpose.COPY_HELD

    @property
    def copies(self) -> bool:
        """Return whether this load copies blocks."""
        return self is not LoadPurpose.HOLD
