"""What a supervisor imports. The import contract `a supervisor stays small` follows our own modules; this runs them."""

import subprocess
import sys

from shoal.agent.devices.installation import LIMIT_S, DriverSearch, start_search
from shoal.agent.devices.installed import present_drivers
from shoal.agent.driver_port import DriverOptions

LARGE = (
    "aiomqtt", "cryptography", "email", "http.client", "importlib.metadata", "multiprocessing", "numpy", "onnxruntime",
    "grpc", "paho", "prometheus_client", "psutil", "rich", "zipfile",
)  # fmt: skip
"""Modules that took 0.5 MB or more of one, and that it does not need while it runs."""
SHOW = f"""
import contextlib, io, sys
for each in ("attr", "greenlet"):
    sys.modules[each] = None
import shoal.agent.main
with contextlib.redirect_stdout(io.StringIO()):
    shoal.agent.main.main(["clock", "--state-dir", "/nowhere"])  # as any command, before its own imports
import shoal.agent.main.run
print(*sorted(set({LARGE}) & set(sys.modules)))
"""


def test_a_supervisor_imports_no_large_module_that_it_does_not_use() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


def test_a_program_says_what_is_installed() -> None:
    search = DriverSearch(DriverOptions(emulate=("xr5610-l4",), time_scale=2.0), cpu=False)
    found = start_search(search).wait(LIMIT_S)
    assert found.drivers == present_drivers(search.options, cpu=False)
    assert "emulated" in found.drivers
    assert found.version
