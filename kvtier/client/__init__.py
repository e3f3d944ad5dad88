"""The client library for engines: finds the daemon, looks up, loads and stores blocks."""

from kvtier.client.client import Client
from kvtier.client.loads import HeldBlocks
from kvtier.client.outbox import Announcement
from kvtier.client.types import ClientDeadlines, FoundBlocks, LoadedBlock, OwnTier

__all__ = [
    "Announcement",
    "Client",
    "ClientDeadlines",
    "FoundBlocks",
    "HeldBlocks",
    "LoadedBlock",
    "OwnTier",
]
