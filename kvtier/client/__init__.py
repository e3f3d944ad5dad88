"""What any engine links: find the daemon, look blocks up, load and store them; fails open."""

from kvtier.client.client import Client, ClientDeadlines
from kvtier.client.lease import HeldBlocks
from kvtier.client.outbox import Announcement
from kvtier.client.types import FoundBlocks, LoadedBlock, OwnTier

__all__ = [
    "Announcement",
    "Client",
    "ClientDeadlines",
    "FoundBlocks",
    "HeldBlocks",
    "LoadedBlock",
    "OwnTier",
]
