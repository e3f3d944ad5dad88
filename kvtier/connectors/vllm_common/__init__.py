"""Shared by both connectors for vLLM: supported releases, models and settings, and vLLM's log.

Only ``release`` imports vLLM at import time.
"""
