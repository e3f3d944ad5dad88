"""The node's state: which blocks are where, what is in flight, sessions, and past decisions."""
