"""Which ONNX Runtime is installed. Does not import it, because only workers do."""

from importlib import metadata

_OPENVINO = "onnxruntime-openvino"
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", _OPENVINO, "onnxruntime-rocm")


def cpu_provider() -> str:
    """Execution provider for the CPU.

    ONNX Runtime's build with OpenVINO replaces the plain one in an environment. So a node offers its CPU and memory
    once, through the better of the two.
    """
    try:
        metadata.version(_OPENVINO)
    except metadata.PackageNotFoundError:
        return "CPUExecutionProvider"
    return "OpenVINOExecutionProvider"


def runtime_version() -> str:
    """Like `onnxruntime 1.31.1`; empty if none is installed."""
    for name in _DISTRIBUTIONS:
        try:
            return f"onnxruntime {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""
