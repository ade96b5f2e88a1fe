"""Programs in a pseudo-terminal: what somebody at a keyboard sees and types."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WAIT_S: Final = 30.0
"""Seconds without output after which nothing more is expected."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
INTERRUPT: Final = b"\x03"


@dataclass(frozen=True, slots=True)
class TerminalAnswer:
    """What a program left on the screen."""

    status: int
    # Without colours and carriage returns.
    lines: tuple[str, ...]
    has_colours: bool


def _take_terminal() -> None:
    """So that Ctrl-C is a signal, and one that counts: what runs in the background of a script ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_in_terminal(
    columns: int, *command: str, environment: Mapping[str, str] | None = None, interrupt_at: str = ""
) -> TerminalAnswer:
    """All that the program has is a terminal of this width. interrupt_at: Ctrl-C is typed once this was printed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {**(os.environ if environment is None else environment), "TERM": "xterm-256color"}
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, close_fds=True, start_new_session=True,
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(theirs)
    printed = b""
    waits = bool(interrupt_at)
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # Linux: nobody holds the other end any more
            break
        if not chunk:
            break
        printed += chunk
        if waits and interrupt_at.encode() in printed:
            os.write(ours, INTERRUPT)
            waits = False
    os.close(ours)
    text = printed.decode()
    lines = tuple(line.rstrip("\r") for line in _ANSI.sub("", text).split("\n"))
    return TerminalAnswer(process.wait(30), lines, "\x1b[" in text)


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
