"""The integrated engine: paged attention on top of transformers' model code.

It knows nothing about tiers or gRPC: everything below the GPU is behind ``port.KVPort``.
"""
