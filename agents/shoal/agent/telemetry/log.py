"""LogFileReader: the supervisor's port to this node's log files."""

import asyncio
from pathlib import Path
from typing import Final

from shoal.host import log_files
from shoal.types.link import LogLines, LogsAsked

FOLDER: Final = "log"
"""Name of the folder in the state directory."""


class LogFileReader:
    """`ports.Logs`: reads the log files of supervisor and front, and those of the workers in `run/`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def read(self, asked: LogsAsked) -> LogLines:
        return await asyncio.to_thread(self._read, asked)

    def _read(self, asked: LogsAsked) -> LogLines:
        kept = (self._state_dir / FOLDER).glob("*.log*")
        page = log_files.read([*kept, *(self._state_dir / "run").glob("*.log")], asked.after, asked.lines)
        return LogLines(asked.request, page.lines, page.after, page.more)
