"""What any engine links: find the daemon, look blocks up, load and store them; fails open."""

from kvtier.client.client import Client, ClientDeadlines
from kvtier.client.link import LoadedBlock

__all__ = ["Client", "ClientDeadlines", "LoadedBlock"]
