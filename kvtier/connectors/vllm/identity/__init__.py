"""What makes blocks the same: weights, layout, settings, and what a request adds to its tokens."""
