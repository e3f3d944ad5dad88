"""The integrated engine: paged attention over transformers' model code.

It knows nothing of tiers or gRPC: what is below the GPU reaches it through ``port.KVPort``.
"""
