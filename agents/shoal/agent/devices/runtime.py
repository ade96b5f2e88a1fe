"""Which ONNX Runtime is installed, without importing it (that is a worker's business)."""

from importlib import metadata

_OPENVINO = "onnxruntime-openvino"
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", _OPENVINO, "onnxruntime-rocm")


def cpu_provider() -> str:
    """What runs models on the processor. ONNX Runtime's build with OpenVINO takes the place of the plain one in an
    environment, so that a node offers its processor, and its memory, once: by the better of the two."""
    try:
        metadata.version(_OPENVINO)
    except metadata.PackageNotFoundError:
        return "CPUExecutionProvider"
    return "OpenVINOExecutionProvider"


def runtime_version() -> str:
    """`onnxruntime 1.31.1`, or empty when there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return f"onnxruntime {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""
