"""What a load is for."""

from enum import Enum, auto

__all__ = ["LoadPurpose"]


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
