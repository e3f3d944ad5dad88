"""The Redis tier: blocks in Redis or Valkey, on one server, behind Sentinels or in a cluster.

Only ``settings`` can be imported without the package redis, which is an extra.
"""
