"""What a client says of a request besides its tokens: hints, wishes and limits."""

from dataclasses import dataclass

__all__ = ["NO_TRAITS", "Traits"]


@dataclass(frozen=True, slots=True)
class Traits:
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


NO_TRAITS = Traits()
"""Of a request of which nothing is said."""
