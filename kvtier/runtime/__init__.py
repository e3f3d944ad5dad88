"""Runs a node in the daemon: the asyncio driver, each tier's threads, and background checks."""
