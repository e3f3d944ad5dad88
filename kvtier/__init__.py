"""kvtier keeps completed KV blocks in tiers and brings them back when that beats recomputing."""

__version__ = "0.1.0"
