"""Programs in a pseudo-terminal: what somebody at a keyboard sees and types."""

import codecs
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
INTERRUPT: Final = "\x03"


@dataclass(frozen=True, slots=True)
class TerminalAnswer:
    """What a program left on the screen."""

    status: int
    # Without colours and carriage returns.
    lines: tuple[str, ...]
    has_colours: bool


class PseudoTerminal:
    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self._process = process
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.seen = ""
        """What was shown since what was expected last."""
        self.shown = ""
        """All that was shown."""

    def expect(self, text: str) -> None:
        """Wait until it has been shown."""
        while text not in self.seen:
            assert self._read(), f"not {text!r} but {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def read_to_end(self) -> str:
        """What is shown until the process ends."""
        while self._read():
            pass
        return self.seen

    def status(self) -> int:
        """Of the process, which is about to end."""
        return self._process.wait(WAIT_S)

    def _read(self) -> bool:
        """Whether there was more."""
        if not select.select([self._descriptor], [], [], WAIT_S)[0]:
            return False
        chunk = b""
        with suppress(OSError):  # EIO: the process has ended
            chunk = os.read(self._descriptor, 65536)
        text = self._decoder.decode(chunk)
        self.seen += text
        self.shown += text
        return bool(chunk)


@contextmanager
def terminal(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None, columns: int = 100
) -> Iterator[PseudoTerminal]:
    """Run it in a terminal of this width until the end of the block, where it has to have ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {**environment, "TERM": "xterm-256color"}
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, cwd=folder, start_new_session=True,
        preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield PseudoTerminal(ours, process)
    finally:
        os.close(ours)  # hangs up
        process.wait(WAIT_S)


def run_in_terminal(
    columns: int, *command: str, environment: Mapping[str, str] | None = None, interrupt_at: str = ""
) -> TerminalAnswer:
    """All that the program has is a terminal of this width. interrupt_at: Ctrl-C is typed once this was shown."""
    with terminal(command, os.environ if environment is None else environment, columns=columns) as window:
        if interrupt_at:
            window.expect(interrupt_at)
            window.type(INTERRUPT)
        window.read_to_end()
        text, status = window.shown, window.status()
    lines = tuple(line.rstrip("\r") for line in _ANSI.sub("", text).split("\n"))
    return TerminalAnswer(status, lines, "\x1b[" in text)


def _take_terminal() -> None:
    """So that Ctrl-C is a signal, and one that counts: what runs in the background of a script ignores it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
