"""The supervisor's ports to structured logs: StructuredLog writes events, LogFileReader reads this node's log files."""

import asyncio
from pathlib import Path
from typing import Final

import structlog

from shoal.host import log_files
from shoal.types.link import LogLines, LogsAsked

FOLDER: Final = "log"
"""Name of the folder in the state directory."""


class StructuredLog:
    """`ports.Log`."""

    def __init__(self, **always: str) -> None:
        """`always`: fields of every event, such as the node's name."""
        self._logger = structlog.get_logger().bind(**always)

    def __call__(self, event: str, *, error: bool = False, **fields: str | float | None) -> None:
        (self._logger.error if error else self._logger.info)(event, **fields)


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
