"""Becomes a program that ends with whoever started it: `python -m shoal.devstack.temporary_member PID PROGRAM ..`.

PID: of whoever started it. The kernel sends SIGTERM when that one ends, however it does; a program that is paused then
(`shoal dev break NAME pause`) gets it when it goes on.
"""

import os
import signal
import sys
from collections.abc import Sequence

from shoal.host.parent_death import end_with_parent


def temporary_command(command: Sequence[str]) -> list[str]:
    """The command line by which this process starts the program."""
    return [sys.executable, "-m", __spec__.name, str(os.getpid()), *command]


def main() -> None:
    starter, *command = sys.argv[1:]
    end_with_parent(signal.SIGTERM)
    if os.getppid() == int(starter):  # else it ended before the kernel was asked
        os.execvp(command[0], command)


if __name__ == "__main__":
    main()
