"""Which ONNX Runtime is installed. Does not import it, because only workers do."""

from importlib import metadata

_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-rocm")


def runtime_version() -> str:
    """Like `onnxruntime 1.31.1`; empty if none is installed."""
    for name in _DISTRIBUTIONS:
        try:
            return f"onnxruntime {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""
