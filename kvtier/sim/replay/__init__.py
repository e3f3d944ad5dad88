"""Replaying traces: the production node and its policies, under a clock that a trace moves."""
