"""What attaches engines: thin layers over the client."""
