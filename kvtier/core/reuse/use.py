"""A use: what one request tells of its chain, and what was known of it before."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.identity import NO_TENANT
from kvtier.core.traits import NO_TRAITS, Traits

__all__ = ["LENGTH_TOKENS", "Touched", "Use"]

LENGTH_TOKENS = 512
"""New parts of requests are told apart by powers of two from here on."""

_SOON_S, _LATER_S = 60.0, 600.0
"""Where hints of when a chain comes back are told apart: at once, in a conversation, some time."""


@dataclass(frozen=True, slots=True)
class Use:
    """One request's chain, whoever answers it."""

    keys: Sequence[bytes]
    """Block hashes of its full blocks, from the root on; unique across tenants and key spaces."""
    payload_bytes: int
    block_tokens: int
    tenant: bytes = NO_TENANT
    traits: Traits = NO_TRAITS
    num_prompt_blocks: int = -1
    """Blocks from this one on hold generated tokens; -1: none does."""

    def length(self, num_blocks: int) -> int:
        """Return how long so many blocks are, as the number of bits of a length in tokens."""
        return (num_blocks * self.block_tokens // LENGTH_TOKENS).bit_length()

    @property
    def hint(self) -> int:
        """Return what the client says of the chain's future, coarsely; 0: nothing."""
        continues, gap_s = self.traits.continues, self.traits.gap_s
        if continues is None and gap_s is None:
            return 0
        if continues is not None and continues < 0.75:
            return 1 if continues < 0.25 else 2
        if gap_s is None:
            return 3
        return 4 + (gap_s > _SOON_S) + (gap_s > _LATER_S)


@dataclass(frozen=True, slots=True)
class Touched:
    """What was remembered of a chain before a use of it."""

    num_known: int
    """Leading blocks, resident or ghosts."""
    turn: int
    """0: it is new, or known is only what many chains share; 1: its second turn, and so on."""
    times_seen: int
    """How often the last known block was named before."""
