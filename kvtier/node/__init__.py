"""The node: a synchronous state machine that makes every decision of the daemon, without I/O."""
