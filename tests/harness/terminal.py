"""A process in a pseudo-terminal, and what somebody types into it."""

import os
import pty
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

WAIT_S = 30.0
"""Seconds without output after which nothing more is expected."""


class PseudoTerminal:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.seen = ""

    def expect(self, text: str) -> None:
        """Wait until it has been shown; what came before is gone then."""
        while text not in self.seen:
            more = self._read()
            assert more, f"not {text!r} but {self.seen!r}"
            self.seen += more
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def read_to_end(self) -> str:
        """What is shown until the process ends."""
        while more := self._read():
            self.seen += more
        return self.seen

    def _read(self) -> str:
        if not select.select([self._descriptor], [], [], WAIT_S)[0]:
            return ""
        with suppress(OSError):  # EIO: the process has ended
            return os.read(self._descriptor, 65536).decode(errors="replace")
        return ""


@contextmanager
def terminal(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[PseudoTerminal]:
    """Run it in a terminal of 100 columns until the end of the block, where it has to have ended."""
    process, descriptor = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], list(command), {**environment, "COLUMNS": "100", "TERM": "xterm"})
    try:
        yield PseudoTerminal(descriptor)
    finally:
        os.close(descriptor)  # hangs up
        os.waitpid(process, 0)
