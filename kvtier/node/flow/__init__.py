"""How requests and blocks flow: lookups, loads, stores, and writes to slower tiers."""
