"""The driver of a node: a synchronous state machine, and the asyncio loop beside it."""
