"""One line that describes the machine, so that figures can be compared."""

import os
import platform
from pathlib import Path


def machine_line() -> str:
    """Processor, cores, memory, system, versions, and the load at the time of the call."""
    import onnxruntime

    processor = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"# machine: {os.cpu_count()} x {processor}, {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, ONNX Runtime {onnxruntime.__version__}, load {os.getloadavg()[0]:.2f}"
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
