"""The command line: thin over the parts."""

import os

# gRPC reads this when it is first imported. It would write a line of its own to standard error for
# every stranger whose TLS handshake fails; what a call of ours meets, comes out as an error anyway.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
