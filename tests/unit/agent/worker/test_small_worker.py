"""What a worker imports, with the runtime, before a model needs more."""

import subprocess
import sys

LARGE = (
    "argparse", "cryptography", "google.protobuf.json_format", "greenlet", "grpc", "ml_dtypes", "multiprocessing",
    "numpy.random", "numpy.testing", "onnx", "prometheus_client", "psutil", "pydantic", "rich", "scipy", "yaml",
    "zipfile",
)  # fmt: skip
"""Modules that took 0.5 MB or more of one where they are installed, and that a model does without. `ml_dtypes` is
imported for tensors of BF16, `zipfile` for samples."""
SHOW = f"""
import sys
import shoal.agent.worker.main
import shoal.agent.worker.service
print(*sorted(set({LARGE}) & set(sys.modules)))
from shoal.agent.worker.tensors import DATATYPES
print(DATATYPES["BF16"].dtype, "ml_dtypes" in sys.modules)
"""


def test_a_worker_imports_no_large_module_that_it_does_not_use() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    large, late = shown.stdout.split("\n")[:2]
    assert large.split() == []
    assert late == "bfloat16 True"
