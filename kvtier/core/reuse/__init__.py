"""What is learned from the reuse of blocks: the history of chains, and predictions from it."""

from kvtier.core.reuse.history import History
from kvtier.core.reuse.use import TouchResult, Use

__all__ = ["History", "TouchResult", "Use"]
