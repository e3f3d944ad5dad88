"""Connectors between engines and the client; ``kit`` contains their shared parts."""
