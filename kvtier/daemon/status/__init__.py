"""What the daemon reports about itself: status, explanations, gauges and health."""
