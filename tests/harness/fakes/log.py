"""RecordingLog: a log that keeps its events."""

from typing import Any


class RecordingLog:
    """`shoal.agent.ports.Log`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    @property
    def events(self) -> list[str]:
        """Their names."""
        return [line["event"] for line in self.lines]

    def info(self, event: str, /, **fields: str | float | None) -> None:
        self.lines.append({"event": event, **fields})

    def warning(self, event: str, /, **fields: str | float | None) -> None:
        self.lines.append({"event": event, **fields})

    def error(self, event: str, /, **fields: str | float | None) -> None:
        self.lines.append({"event": event, **fields})
