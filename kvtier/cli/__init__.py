"""The command-line interface."""

import os

# gRPC reads this when it is imported. By default it logs every failed TLS handshake to standard
# error; failures of our own calls are reported as errors anyway.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
