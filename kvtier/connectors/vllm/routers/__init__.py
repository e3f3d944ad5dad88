"""What routers that listen to vLLM's KV events hear of the daemon's tiers."""
