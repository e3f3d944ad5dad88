"""The remote tier: blocks in Redis or Valkey, one server, behind Sentinels, or a cluster.

Imported where a server is configured, and nowhere else: it needs a package that is an extra. The
import raises StartError without it.
"""

import importlib.util

from kvtier.errors import StartError

if importlib.util.find_spec("redis") is None:
    raise StartError("remote.url", "needs the package redis", "pip install 'kvtier[redis]'")

from kvtier.tiers.remote.options import RemoteOptions
from kvtier.tiers.remote.tier import RemoteTier

__all__ = ["RemoteOptions", "RemoteTier"]
