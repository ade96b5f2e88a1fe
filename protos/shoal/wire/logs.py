"""Logs of every process: one event, one JSON line on stderr, whatever the event says and whoever reports it.

Everything that is not printable ASCII is escaped, so that no line break, terminal sequence or look-alike that came with
a request reaches the log as itself. Python's own logging, its warnings and what nobody caught come out alike. What
gRPC's core would write by itself is switched off where the programs begin (`shoal.agent`, `shoal.coordinator`): it has
a line for every stranger that fails the handshake.
"""

import io
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, cast

import structlog

from shoal.wire.logfiles import Kept

LEVELS: Final = ("debug", "info", "warning", "error")
LONGEST: Final = 4000
"""Characters of one value; more is cut, with how long it was."""


def configure(level: str = "info", *, keep: Path | None = None, **always: str) -> None:
    """Once a process. always: fields of every event, such as the kind of process. keep: a file for the newest lines,
    of this process alone; `logfiles` reads it."""

    def constant(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**always, **event}

    _unbuffered()
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            constant,
            _bounded,
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # A line and its end by one write: another process may have the same stderr.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Stderr(Kept(keep) if keep is not None else None))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=max(least, logging.WARNING), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught


def _unbuffered() -> None:
    """What a full disk does not take would stay in a buffer, be tried again at the end, and make Python end with status
    120 whatever the program says (Python's `sys.exit`). A stand-in, such as a test's, is left."""
    own = sys.__stderr__
    if own is not None and sys.stderr is own:
        raw = io.FileIO(own.fileno(), "wb", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, encoding=own.encoding, errors=own.errors, write_through=True)


class _Stderr:
    """On a full disk lines are lost, and nothing else: who cannot log goes on working."""

    def __init__(self, kept: Kept | None) -> None:
        self._kept = kept

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
        if self._kept is not None:
            with suppress(OSError):
                self._kept.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


class _ToStructlog(logging.Handler):
    """What libraries say through Python's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def _bounded(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: _cut(value) if isinstance(value, str) else value for key, value in event.items()}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}.. of {len(text)} characters"


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger().critical("ended by an error", exc_info=(kind, error, trace))
