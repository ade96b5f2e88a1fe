"""Runs a short program of the agent: one order on its standard input, one answer on its standard output, and it ends.

For what takes a library that the process must not hold for as long as it runs.
"""

import subprocess
import sys
from typing import Any, TypeVar

from shoal.agent.packing import pack, unpack
from shoal.types.codes import Code, refuse

T = TypeVar("T")


def run_program(module: str, order: Any, answer: type[T], *arguments: str, limit_s: float) -> T:
    """What `python -m module arguments` answers to this order; both are frozen dataclasses. Blocks until it ends.

    Raises ShoalError(INTERNAL) where it does not end by itself, with an answer, within `limit_s`.
    """
    command = (sys.executable, "-P", "-m", module, *arguments)
    try:
        ended = subprocess.run(command, input=pack(order), stdout=subprocess.PIPE, timeout=limit_s, check=True)
    except (OSError, subprocess.SubprocessError) as cause:
        raise refuse(Code.INTERNAL, f"{cause}"[:300], "an answer", "see the agent's log") from cause
    return unpack(answer, ended.stdout)
