"""The daemon's gRPC services: messages in, events to the node, answers out."""
