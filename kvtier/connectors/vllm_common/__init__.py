"""Shared parts of both vLLM connectors: supported releases, models and settings, and logging.

Only ``release`` imports vLLM at import time.
"""
