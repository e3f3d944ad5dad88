"""How the daemon opens, attaches, detaches and benchmarks its tiers."""
