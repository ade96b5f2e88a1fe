"""ports.Signals over both kinds of feed, files and URLs."""

from pathlib import Path

from shoal.coordinator.core.signals.feed import parse_readings
from shoal.coordinator.core.signals.model import SignalName, SignalReading
from shoal.coordinator.ports import Clock
from shoal.coordinator.signals.files import FeedFiles, FileText
from shoal.coordinator.signals.web import FeedUrls


class Sources:
    """A source with `://` is a URL; any other is a file in the folder."""

    def __init__(self, files: FeedFiles, urls: FeedUrls, clock: Clock) -> None:
        self._files = files
        self._urls = urls
        self._clock = clock
        self._read = dict[tuple[SignalName, str], tuple[FileText, tuple[SignalReading, ...]]]()

    async def read(self, name: SignalName, source: str) -> tuple[SignalReading, ...]:
        """Raises ShoalError(SOURCE_DENIED | SOURCE_UNREACHABLE | SIGNAL_INVALID)."""
        if "://" in source:
            return parse_readings(name, await self._urls.read(source), self._clock.wall())
        known = self._read.get((name, source))
        file = await self._files.read(source, known[0] if known else None)
        if known is not None and file is known[0]:
            return known[1]
        found = parse_readings(name, file.text, file.written_at)
        self._read = {key: value for key, value in self._read.items() if key[0] != name}
        self._read[name, source] = file, found
        return found


def open_sources(folder: Path, hosts: tuple[str, ...], clock: Clock) -> Sources:
    """folder: of feeds that are files. hosts: hosts inside this network that feeds may come from."""
    return Sources(FeedFiles(folder), FeedUrls(hosts), clock)
