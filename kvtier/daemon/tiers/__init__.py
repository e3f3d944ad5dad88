"""Opening, attaching, detaching and benchmarking of the daemon's tiers."""
