"""What is learned of how blocks are used: the history of chains, and what it says of the future."""

from kvtier.core.reuse.history import History
from kvtier.core.reuse.use import TouchResult, Use

__all__ = ["History", "TouchResult", "Use"]
