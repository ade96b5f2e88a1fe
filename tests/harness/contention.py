"""What other programs take from this machine's cores just now, for figures that are stated for a machine at rest."""

import subprocess
import sys

from shoal.agent.clock import SystemClock

USUAL_IMPORT_S = 0.8
"""What `seconds_to_import` says on two cores with nothing else to do, at most."""


def seconds_to_import() -> float:
    """How long a Python takes right now to do no more than import what a supervisor does."""
    clock = SystemClock()
    started = clock.now()
    subprocess.run([sys.executable, "-c", "import shoal.agent.main.run"], check=True, timeout=60)
    return clock.now() - started


def slowed_by_others() -> float:
    """Seconds that the start of a supervisor takes longer than on a machine at rest."""
    return max(0.0, seconds_to_import() - USUAL_IMPORT_S)
