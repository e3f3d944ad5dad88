"""The daemon's gRPC services."""
