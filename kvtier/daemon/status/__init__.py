"""The daemon's reports about itself: status, explanations, gauges and health."""
