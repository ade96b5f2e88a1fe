"""The agent: device side and data plane."""

import os

# One log line per event: gRPC's core would add its own lines for every client that fails the handshake. It reads this
# variable when `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
