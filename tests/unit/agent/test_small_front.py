"""What a front imports. The import contract `a front stays small, and speaks by the own transport` follows our own
modules; this runs them."""

import subprocess
import sys

LARGE = (
    "aiomqtt", "bz2", "cryptography", "email.message", "grpc", "html", "http.client", "http.server",
    "importlib.metadata", "lzma", "multiprocessing", "numpy", "onnxruntime", "prometheus_client", "psutil", "pydantic",
    "rich", "shutil", "statistics", "tempfile", "urllib.request", "wsgiref", "yaml", "zipfile",
)  # fmt: skip
"""Modules that it does not need while nobody reads its metrics: with Prometheus's client they were 4 MB. `rich`, which
structlog imports where the command line is installed beside the agent, was 5."""
ROOMS = {"core", "dataplane", "frames", "identity", "journal", "main", "telemetry"}
"""Of the agent; the rest is its supervisor's, or its workers'. Of `identity` it takes which boot this is."""
SHOW = f"""
import contextlib, sys
for each in ("attr", "greenlet"):
    sys.modules[each] = None
import shoal.agent.main
with contextlib.suppress(FileNotFoundError):
    shoal.agent.main.main(["front", "--config", "/nowhere/run/front.config"])
print(*sorted(set({LARGE}) & set(sys.modules)))
names = [name.split(".") for name in sys.modules if name.startswith("shoal.agent.")]
print(*sorted({{name[2] for name in names if len(name) > 3}}))
import shoal.agent.dataplane.page
print("prometheus_client" in sys.modules)
"""


def test_a_front_imports_no_large_module_that_it_does_not_use() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    large, rooms, late = shown.stdout.split("\n")[:3]
    assert large.split() == []
    assert set(rooms.split()) == ROOMS
    assert late == "True", "the first scrape brings it"
