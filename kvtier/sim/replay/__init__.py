"""Replays traces against the node with simulated tiers and engines, for ``kvtier replay``."""
