"""How much other programs slow this machine now, for figures that are stated for an idle machine."""

import subprocess
import sys

from shoal.agent.clock import SystemClock

USUAL_IMPORT_S = 0.8
"""What `seconds_to_import` says on two cores with nothing else to do, at most."""


def import_duration_s() -> float:
    """Seconds that a Python process takes now to import what a supervisor imports."""
    clock = SystemClock()
    started = clock.now()
    subprocess.run([sys.executable, "-c", "import shoal.agent.main.run"], check=True, timeout=60)
    return clock.now() - started


def startup_slowdown_s() -> float:
    """Seconds by which a supervisor's start takes longer than on an idle machine."""
    return max(0.0, import_duration_s() - USUAL_IMPORT_S)
