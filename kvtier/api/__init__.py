"""The faces that the outside sees: gRPC services and the HTTP server."""
