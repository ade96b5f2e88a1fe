"""Which ONNX Runtime is installed, without importing it (that is a worker's business)."""

from importlib import metadata

_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-rocm")


def runtime_version() -> str:
    """`onnxruntime 1.31.1`, or empty when there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return f"onnxruntime {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""
