"""Bytes between vLLM's tensors and the arena: which they are, how they are copied, and on what."""
