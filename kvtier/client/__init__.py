"""What any engine links: find the daemon, look blocks up, load and store them; fails open."""

from kvtier.client.client import Client, ClientDeadlines
from kvtier.client.lease import Held
from kvtier.client.outbox import Announcement
from kvtier.client.terms import Found, LoadedBlock, OwnTier

__all__ = ["Announcement", "Client", "ClientDeadlines", "Found", "Held", "LoadedBlock", "OwnTier"]
