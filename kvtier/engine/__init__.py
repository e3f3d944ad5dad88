"""The integrated engine: paged attention on top of transformers' model code.

It does not depend on tiers or gRPC: everything below the GPU is behind ``port.KVPort``.
"""
