"""Connectors: attach engines to the client. ``kit`` has what they share."""
