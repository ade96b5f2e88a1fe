"""The supervisor's Log port, on structured logs."""

import structlog


class StructuredLog:
    """The Log port."""

    def __init__(self, **always: str) -> None:
        """always: fields of every event, such as the node's name."""
        self._logger = structlog.get_logger().bind(**always)

    def __call__(self, event: str, *, error: bool = False, **fields: str | float | None) -> None:
        (self._logger.error if error else self._logger.info)(event, **fields)
