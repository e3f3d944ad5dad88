"""Simulates the node under a simulated clock: each seed is one run with faults and crashes."""
