#!/bin/sh
# Regenerates the committed stubs beside their .proto files. PYTHON names the interpreter with grpcio-tools and mypy-protobuf.
set -eu
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}
PATH="$(dirname "$(command -v "$PYTHON")"):$PATH"
"$PYTHON" -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
  shoal/v1/*.proto shoal/inference/*.proto shoal/etcd/*.proto
