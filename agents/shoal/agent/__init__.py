"""The device side and the data plane."""

import os

# One event, one line: gRPC's core would add lines of its own for every stranger that fails the handshake. It reads this
# when `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
