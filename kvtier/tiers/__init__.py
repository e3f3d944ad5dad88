"""Storage tiers. A tier stores and returns blocks; it takes no policy decisions."""
