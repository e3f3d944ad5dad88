"""Opens the Redis tier: blocks in Redis or Valkey, on one server, behind Sentinels or in a cluster.

Imported where a server is configured, and nowhere else: it needs a package that is an extra. The
import raises StartError without it.
"""

import importlib.util

from kvtier.errors import StartError

if importlib.util.find_spec("redis") is None:
    raise StartError("remote.url", "needs the redis package", "pip install 'kvtier[redis]'")

from kvtier.tiers.redis.tier import RedisOptions, RedisTier

__all__ = ["RedisOptions", "RedisTier"]
