"""The public interfaces: gRPC services and HTTP servers."""
