"""The supervisor's ports to structured logs: Log writes them, Logs reads what this node's processes kept of them."""

import asyncio
from pathlib import Path
from typing import Final

import structlog

from shoal.types.link import LogLines, LogsAsked
from shoal.wire import logfiles

FOLDER: Final = "log"
"""In the state directory."""


class StructuredLog:
    """The Log port."""

    def __init__(self, **always: str) -> None:
        """always: fields of every event, such as the node's name."""
        self._logger = structlog.get_logger().bind(**always)

    def __call__(self, event: str, *, error: bool = False, **fields: str | float | None) -> None:
        (self._logger.error if error else self._logger.info)(event, **fields)


class KeptLogs:
    """The Logs port: supervisor's and front's files, and those of the workers in `run/`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def read(self, asked: LogsAsked) -> LogLines:
        return await asyncio.to_thread(self._read, asked)

    def _read(self, asked: LogsAsked) -> LogLines:
        kept = (self._state_dir / FOLDER).glob("*.log*")
        page = logfiles.read([*kept, *(self._state_dir / "run").glob("*.log")], asked.after, asked.lines)
        return LogLines(asked.request, page.lines, page.after, page.more)
