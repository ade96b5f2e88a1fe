"""Runs a short program of the agent: one order on its standard input, one answer on its standard output, and it ends.

For what takes a library that the process must not hold for as long as it runs.
"""

import subprocess
import sys
from typing import Any, Generic, TypeVar

from shoal.agent.packing import pack, unpack
from shoal.types.codes import Code, refuse

T = TypeVar("T")


class StartedProgram(Generic[T]):
    """`python -m module arguments`, started with the construction. Gets its order when it is waited for: meanwhile it
    imports, which takes most of its time."""

    def __init__(self, module: str, order: Any, answer: type[T], *arguments: str) -> None:
        """`order` and the answer are frozen dataclasses. Raises ShoalError(INTERNAL) if it cannot be started."""
        self._order = pack(order)
        self._answer = answer
        self._name = " ".join((module, *arguments))
        command = (sys.executable, "-P", "-m", module, *arguments)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except OSError as cause:
            raise refuse(Code.INTERNAL, f"{self._name}: {cause}", "an answer", "see the agent's log") from cause

    def wait(self, limit_s: float) -> T:
        """The answer. Blocks; call it once. Raises ShoalError(INTERNAL) where the program does not end by itself, with
        status 0, within `limit_s`."""
        with self._process as process:
            try:
                answer, _ = process.communicate(self._order, timeout=limit_s)
            except subprocess.TimeoutExpired as cause:
                process.kill()
                found = f"{self._name}: nothing within {limit_s:g} s"
                raise refuse(Code.INTERNAL, found, "an answer", "see the agent's log") from cause
        if process.returncode != 0:
            found = f"{self._name}: status {process.returncode}"
            raise refuse(Code.INTERNAL, found, "an answer", "see the agent's log")
        return unpack(self._answer, answer)


def run_program(module: str, order: Any, answer: type[T], *arguments: str, limit_s: float) -> T:
    """The answer of a `StartedProgram`. Raises as that."""
    return StartedProgram(module, order, answer, *arguments).wait(limit_s)
