"""Logs of every process: each event is one JSON line on stderr, whatever it contains and whoever reports it.

All characters but printable ASCII are escaped, so that no line break, terminal sequence or look-alike from a request
reaches the log unescaped. Python's own logging, its warnings and uncaught errors come out in the same form. The entry
points (`shoal.agent`, `shoal.coordinator`) switch off gRPC's own log, because it writes a line for every unknown caller
whose handshake fails.
"""

import io
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO, cast

import structlog

from shoal.host.log_files import RotatingLogFile

LEVELS: Final = ("debug", "info", "warning", "error")
MAX_VALUE_CHARS: Final = 4000
"""Characters of one value. A longer value is cut, and its length noted."""


def configure(level: str = "info", *, log_file: Path | None = None, **always: str) -> None:
    """Call once per process.

    always: fields of every event, such as the kind of process. log_file: file of this process alone for its newest
    lines, which `log_files` reads.
    """

    def constant(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**always, **event}

    _unbuffer_stderr()
    least = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            constant,
            _truncate_values,
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        # One write for a line and its end, because another process may have the same stderr.
        logger_factory=structlog.WriteLoggerFactory(
            cast(TextIO, _Stderr(RotatingLogFile(log_file) if log_file is not None else None))
        ),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=max(least, logging.WARNING), force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught


def _unbuffer_stderr() -> None:
    """Writes to stderr without a buffer. On a full disk, a buffer would be written again at exit, and Python would end
    with status 120 whatever the program returns (Python's `sys.exit`). A stand-in, such as a test's, is left alone."""
    own = sys.__stderr__
    if own is not None and sys.stderr is own:
        raw = io.FileIO(own.fileno(), "wb", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, encoding=own.encoding, errors=own.errors, write_through=True)


class _Stderr:
    """Writes log lines. On a full disk it loses lines, so that the process can go on."""

    def __init__(self, kept: RotatingLogFile | None) -> None:
        self._file = kept

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
        if self._file is not None:
            with suppress(OSError):
                self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


class _ToStructlog(logging.Handler):
    """Forwards what libraries log through Python's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        if record.levelno >= logging.ERROR:
            log.error(
                "library_message_logged", message=record.getMessage(), logger=record.name, exc_info=record.exc_info
            )
        elif record.levelno >= logging.WARNING:
            log.warning(
                "library_message_logged", message=record.getMessage(), logger=record.name, exc_info=record.exc_info
            )


def _truncate_values(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {key: _truncate(value) if isinstance(value, str) else value for key, value in event.items()}


def _truncate(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}.. of {len(text)} characters"


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    structlog.get_logger().error("process_crashed", exc_info=(kind, error, trace))
