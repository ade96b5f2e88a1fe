"""Structured logs: one event, one JSON line on stderr."""

import logging
import sys

import structlog


class StructuredLog:
    """The Log port."""

    def __init__(self, **always: str) -> None:
        """always: fields of every event, such as the node's name."""
        self._logger = structlog.get_logger().bind(**always)

    def __call__(self, event: str, *, error: bool = False, **fields: str | float | None) -> None:
        (self._logger.error if error else self._logger.info)(event, **fields)


def configure(process: str) -> None:
    """Once a process. process: supervisor, front or worker. Line breaks inside a value are escaped."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            lambda _logger, _method, event: {"process": process, **event},
            structlog.processors.JSONRenderer(ensure_ascii=True, default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
