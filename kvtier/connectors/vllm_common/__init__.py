"""What both connectors for vLLM share: supported releases, models and settings, and its log.

Only ``release`` imports vLLM.
"""
