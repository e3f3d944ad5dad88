"""The flow of requests and blocks: lookups, loads, stores, and writes to slower tiers."""
