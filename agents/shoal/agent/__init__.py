"""The agent: device side and data plane."""

import os

# One log line per event: gRPC's core would add its own lines for every client that fails the handshake. It reads this
# variable when `grpc` is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# ONNX Runtime, from 1.29 on, tells its maker what a machine runs, and keeps a number for the machine. It reads this
# variable when `onnxruntime` is imported; `disable_telemetry_events` comes after its first message.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
