"""RecordingLog: a log that keeps the names of its events."""


class RecordingLog:
    """`shoal.agent.ports.Log`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def info(self, event: str, /, **fields: str | float | None) -> None:
        self.events.append(event)

    def warning(self, event: str, /, **fields: str | float | None) -> None:
        self.events.append(event)

    def error(self, event: str, /, **fields: str | float | None) -> None:
        self.events.append(event)
