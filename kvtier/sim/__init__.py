"""The node under a simulated clock: one seed, one run, with faults, crashes and reorderings."""
