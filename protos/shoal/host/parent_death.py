"""A process that must not outlive its parent."""

import ctypes
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""prctl(2) of Linux."""


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel sends this process the signal when the thread that started it ends: by default SIGKILL, which ends it
    whatever it does then. This holds for a program that replaces it too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
