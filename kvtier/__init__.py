"""kvtier keeps completed KV blocks in tiers and restores them when that beats recomputing."""

__version__ = "0.1.0"
