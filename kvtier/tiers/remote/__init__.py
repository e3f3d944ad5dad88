"""The remote tier: blocks in Redis or Valkey, one server, behind Sentinels, or a cluster."""

from kvtier.tiers.remote.options import RemoteOptions
from kvtier.tiers.remote.tier import RemoteTier

__all__ = ["RemoteOptions", "RemoteTier"]
