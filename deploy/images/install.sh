#!/bin/sh
# Installs the given parts into /opt/shoal, and leaves out what nothing of Shoal opens: pip, tests of libraries, what ONNX
# Runtime brings for making models and for programs in C, and the debug symbols of ml_dtypes, 23 MB (symbols of libraries
# that patchelf has been at stay: strip would break them).
set -eu
python3 -m venv /opt/shoal
if ! ls dist/wheels/*.whl >/dev/null 2>&1; then
    /opt/shoal/bin/pip wheel --no-cache-dir --wheel-dir dist/wheels --constraint constraints.txt hatchling "$@"
    rm -f dist/wheels/shoal*.whl
fi
./verify.sh dist/wheels
/opt/shoal/bin/pip install --no-index --find-links dist/wheels --no-cache-dir --no-compile --constraint constraints.txt "$@"
cd /opt/shoal/lib/python3*/site-packages
/opt/shoal/bin/pip uninstall --yes --quiet setuptools pip
find . -type d -name tests -prune -exec rm -rf {} +
rm -rf onnxruntime/transformers onnxruntime/tools onnxruntime/quantization onnxruntime/capi/libonnxruntime.so.*
test ! -d ml_dtypes || strip --strip-debug ml_dtypes/*.so
/opt/shoal/bin/python -c 'import grpc, google.protobuf, cryptography'
# What was to be compiled is, of each part, and loads here.
test -z "${COMPILED:-}" || /opt/shoal/bin/python -B "$OLDPWD/deploy/compiled/check.py" "$@"
